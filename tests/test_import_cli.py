"""``trainsim import`` and ``trainsim show megatron`` as a user types them."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import simulator as sim

SCRIPT = """
TP=${TP:-2}
ARGS=(--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32
  --max-position-embeddings 32 --vocab-size 1000 --micro-batch-size 1 --global-batch-size 64
  --bf16 --rampup-batch-size 1 1 1 --frobnicate 3)
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py ${ARGS[@]} --tensor-model-parallel-size $TP
"""


@pytest.fixture
def trainsim(tmp_path):
    (tmp_path / "train.sh").write_text(SCRIPT, encoding="utf-8")

    def run(*arguments, text=None):
        return subprocess.run(
            [sys.executable, "-m", "simulator", *arguments], cwd=tmp_path, input=text,
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    run.folder = tmp_path
    return run


def test_the_scenario_is_printed_and_the_account_goes_to_stderr(trainsim):
    done = trainsim("import", "megatron", "train.sh")
    assert done.returncode == 0
    assert "tp = 2 " in done.stdout
    assert "# --tensor-model-parallel-size 2" in done.stdout
    assert "--frobnicate" in done.stderr
    (trainsim.folder / "out.toml").write_text(done.stdout, encoding="utf-8")
    assert sim.load(trainsim.folder / "out.toml").plan.dp == 4


def test_the_scenario_is_written_whole_and_runs(trainsim):
    done = trainsim("import", "megatron", "train.sh", "--out", "out.toml", "--node", "dgx-a100")
    assert done.returncode == 0
    assert done.stdout.endswith("written: out.toml\n")
    ran = trainsim("run", "out.toml")
    assert ran.returncode == 0, ran.stderr
    assert "dp 4 x tp 2" in ran.stdout
    assert sorted(p.name for p in trainsim.folder.iterdir()) == ["out.toml", "train.sh"]


def test_strict_makes_an_unknown_flag_wrong_input(trainsim):
    done = trainsim("import", "megatron", "train.sh", "--strict", "--out", "out.toml")
    assert done.returncode == 2
    assert "trainsim: --frobnicate: not known (--strict)" in done.stderr
    assert not (trainsim.folder / "out.toml").exists()


def test_a_script_may_come_from_a_pipe_and_flags_may_be_laid_over_it(trainsim):
    done = trainsim(
        "import", "megatron", "-", "--nodes", "2", "--", "--pipeline-model-parallel-size", "2",
        text=SCRIPT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert 'name = "imported"' in done.stdout
    assert "pp = 2 " in done.stdout
    assert "num_nodes = 2" in done.stdout


def test_a_variable_is_given_on_the_command_line(trainsim):
    done = trainsim("import", "megatron", "train.sh", "--var", "TP=4")
    assert "tp = 4 " in done.stdout


def test_the_cluster_of_a_scenario_is_taken_whole(trainsim):
    done = trainsim("import", "megatron", "train.sh", "--cluster", "llama-3-8b-3d")
    assert done.returncode == 0, done.stderr
    assert 'node = "dgx-h100"' in done.stdout
    assert "num_nodes = 8" in done.stdout


def test_a_cluster_of_two_kinds_of_node_is_taken_too(trainsim):
    done = trainsim("import", "megatron", "train.sh", "--cluster", "llama-3-8b-a100-h100")
    assert done.returncode == 0, done.stderr
    assert "dgx-a100" in done.stdout
    assert "dgx-h100" in done.stdout


def test_stages_that_are_balanced_become_a_layout(trainsim):
    done = trainsim("show", "megatron", "llama-3-8b-a100-h100")
    assert done.returncode == 0, done.stderr
    assert "--pipeline-model-parallel-layout 'E" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["none.sh"], "'none.sh' cannot be read (No such file or directory)"),
        (["."], "'.' cannot be read (Is a directory)"),
        (["train.sh", "--var", "TP"], "--var 'TP': write NAME=VALUE, for example TP=8"),
        (["train.sh", "--var", "TP=three"],
         "--tensor-model-parallel-size: 'three' is not a number"),
        (["train.sh", "--node", "dgx-h10"], "did you mean 'dgx-h100'?"),
        (["train.sh", "--cluster", "llama-3-8b-3d", "--nodes", "2"],
         "--cluster is a whole cluster; leave --node and --nodes out"),
        (["train.sh", "--out", "out.sh"], "cannot write 'out.sh': its name must end in .toml"),
        (["train.sh", "--out", "no/out.toml"],
         "cannot write 'no/out.toml': there is no folder 'no'"),
    ],
)  # fmt: skip
def test_wrong_input_is_said_in_a_sentence(trainsim, arguments, sentence):
    done = trainsim("import", "megatron", *arguments)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_bytes_that_are_no_text_are_refused(trainsim):
    (trainsim.folder / "x.sh").write_bytes(b"\xff\xfe\x00")
    done = trainsim("import", "megatron", "x.sh")
    assert done.returncode == 2
    assert "is not a UTF-8 text" in done.stderr


def test_flags_of_a_scenario_are_printed_for_a_shell(trainsim):
    done = trainsim("show", "megatron", "llama-3-8b-3d")
    assert done.returncode == 0
    first, *rest = done.stdout.splitlines()
    assert first == "torchrun --nproc-per-node 8 --nnodes 8 pretrain_gpt.py \\"
    assert "    --tensor-model-parallel-size 4 \\" in rest
    assert "no flag says plan.p2p_overlap" in done.stderr
    back = trainsim("import", "megatron", "-", text=done.stdout)
    assert back.returncode == 0, back.stderr


def test_a_scenarios_flags_are_a_launch_that_is_imported_again(trainsim):
    target = Path("again.toml")
    said = trainsim("show", "megatron", "gpt2-xl-1gpu")
    assert "no flag says run.gradient_passes: it clears, checks and scales" in said.stderr
    done = trainsim("import", "megatron", "-", "--node", "dgx-a100", "--out", str(target),
                    text=said.stdout)  # fmt: skip
    assert done.returncode == 0, done.stderr
    ours, theirs = sim.load("gpt2-xl-1gpu"), sim.load(trainsim.folder / target)
    run = replace(theirs.run, gradient_passes=ours.run.gradient_passes)
    assert (ours.plan, ours.run) == (theirs.plan, run)
