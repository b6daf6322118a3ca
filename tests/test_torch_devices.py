"""GPUs up to their boundary, with torch.cuda made up; and bytes that are alive, on the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra: validate)")

from simulator.validate.torch import worker  # noqa: E402
from simulator.validate.torch.allocation import held_bytes, peak_bytes  # noqa: E402
from simulator.validate.torch.device import DEVICES, Turns  # noqa: E402


@pytest.mark.parametrize(
    ("option", "gpus", "sentence"),
    [
        ("cpu", 0, None),
        ("cuda", 2, None),
        ("cuda-shared", 1, None),
        ("cuda", 0, "torch finds 0 GPUs here; with --device cuda each rank needs its own"),
        (
            "cuda", 1,
            "torch finds 1 GPUs here; with --device cuda each rank needs its own; ranks that share "
            "one take turns with --device cuda-shared",
        ),
        ("cuda-shared", 0, "torch finds 0 GPUs here; with --device cuda-shared one is needed"),
    ],
)  # fmt: skip
def test_too_few_gpus_are_a_sentence(monkeypatch, option, gpus, sentence):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert DEVICES[option].lacking(2) == sentence


def test_each_rank_has_the_gpu_of_its_local_rank_or_all_share_the_first(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert DEVICES["cuda"].here() == torch.device("cuda", 3)
    assert DEVICES["cuda"].link == torch.device("cuda", 3)
    assert DEVICES["cuda-shared"].here() == torch.device("cuda", 0)
    assert DEVICES["cuda-shared"].link == torch.device("cpu")


def test_only_ranks_that_share_a_device_take_turns(tmp_path):
    assert not Turns(DEVICES["cuda"], tmp_path / "turns").take()
    turns = Turns(DEVICES["cuda-shared"], tmp_path / "turns")
    assert turns.take()
    turns.give()
    turns.close()


def test_the_peak_of_a_gpu_is_what_its_allocator_says(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda d: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda d: 17)
    device = SimpleNamespace(type="cuda")
    assert peak_bytes(lambda forget: calls.append("step"), [], device) == 17
    assert calls == ["reset", "step"]


def test_the_machine_names_its_gpu_and_the_versions_beside_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda d: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 3))
    found = worker.machine(SimpleNamespace(device="cuda"))
    names = ("device", "gpus", "cuda", "nccl", "backend")
    assert [found[name] for name in names] == ["NVIDIA H200", 4, "13.0", "2.28.3", "nccl"]


# 1000 floats are held; x + 1 brings 4000 bytes, its double 4000 more before x + 1 goes.
def test_the_peak_on_the_cpu_is_all_that_is_alive_at_once():
    held = torch.zeros(1000)

    def step(forget):
        y = held + 1
        y = y * 2
        del y
        held.add_(1)  # in place: nothing new
        held.view(10, 100)  # nor here

    assert peak_bytes(step, [held], held.device) == 4000 + 8000
    assert held_bytes([held, held.view(10, 100)]) == 4000


# Held are weight and input; then come the product, its gradient and that of the weight.
def test_what_backward_makes_is_counted_too():
    weight = torch.zeros(10, 10, requires_grad=True)
    x = torch.zeros(100, 10)

    def step(forget):
        y = x @ weight
        y.backward(torch.ones_like(y))

    assert peak_bytes(step, [weight, x], x.device) == (400 + 4000) + 4000 + 4000 + 400


def test_what_is_handed_over_counts_no_longer():
    held = torch.zeros(1000)

    def step(forget):
        kept = [held + 1]
        forget(kept[0])
        kept.append(held + 2)

    assert peak_bytes(step, [held], held.device) == 4000 + 4000
