"""Operations as they are described, reported, drawn and paid for."""

import json

import pytest

import simulator as sim
from simulator.describe import catalog
from simulator.describe.cost import Cost
from simulator.errors import DescriptionError
from simulator.operate import operate
from simulator.operate.cost import bill, bills, device_power, step_bills

PART = {"name": "part", "mtbf": "5 h", "per": "cluster", "takes_node": False}
OPERATIONS = {
    "days": 5, "step_time": "1 s", "components": [PART],
    "checkpoint": {"interval": "10 min", "write_time": "60 s"},
}  # fmt: skip
COST = {
    "host_power": "1 kW", "pue": 1.2, "carbon_intensity": "400 g/kWh",
    "electricity_price": "0.10 USD/kWh", "device_price": "2.50 USD/h",
}  # fmt: skip


def load(operations=OPERATIONS, **others):
    return sim.load("gpt2-xl-ddp", {"operations": operations, **others})


def changed(part=None, checkpoint=None, **others):
    component = {**PART, **(part or {})}
    save = {**OPERATIONS["checkpoint"], **(checkpoint or {})}
    return {**OPERATIONS, "components": [component], "checkpoint": save, **others}


def complaint(*args, **changes):
    with pytest.raises(DescriptionError) as caught:
        operate(load(changed(*args, **changes)), seeds=1)
    return str(caught.value)


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"part": {"mtbf": "0 h"}}, "mtbf: 0 seconds must be above 0"),
        ({"part": {"mtbf": "-5 h"}}, "mtbf: -18000 seconds must be above 0"),
        ({"part": {"mtbf": "5"}}, "mtbf: '5' has no unit"),
        ({"part": {"count": 0}}, "count: 0 must be at least 1"),
        ({"part": {"per": "gpu"}}, "per: 'gpu' is not one of device, node, cluster"),
        ({"part": {"mtfb": "5 h"}}, "unknown key 'mtfb', did you mean 'mtbf'?"),
        ({"part": {"distribution": "weibul"}}, "did you mean 'weibull'?"),
        ({"part": {"distribution": "weibull"}}, "shape: distribution 'weibull' of part needs it"),
        ({"part": {"shape": 0.7}}, "shape is for distribution 'weibull'"),
        ({"part": {"repair_time": "1 h"}}, "repair_time: part takes no node"),
        ({"checkpoint": {"interval": "dayly"}}, "or 'young', or 'daly', did you mean 'daly'?"),
        ({"checkpoint": {"interval": "0 s"}}, "interval: 0 seconds must be above 0"),
        ({"checkpoint": {"write_bandwidth": "1 GB/s"}}, "say the same thing; leave one out"),
        ({"checkpoint": {"snapshot_time": "1 s"}}, "snapshot_time is for asynchronous = true"),
        ({"days": 0}, "days: 0.0 must be above 0"),
        ({"spare_nodes": -1}, "spare_nodes: -1 must be at least 0"),
        ({"restart_time": "-1 min"}, "restart_time: -60 seconds must be at least 0"),
        ({"slow_node": {"mtbf": "9 d", "slowdown": 0.9, "detection_time": "1 h"}},
         "slowdown: 0.9 must be above 1"),
        ({"part": {"mtbf": "1 us"}}, "failures in 1 samples of 5 days are too many"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_with_a_sentence(changes, sentence):
    assert sentence in complaint(**changes)


def test_a_checkpoint_needs_a_time_or_a_bandwidth():
    with pytest.raises(DescriptionError, match="write_bandwidth is missing"):
        load({**OPERATIONS, "checkpoint": {}})


def test_a_rule_needs_failures():
    with pytest.raises(DescriptionError, match="nothing fails"):
        operate(load({**changed(checkpoint={"interval": "daly"}), "components": []}), seeds=1)


def test_an_asynchronous_checkpoint_needs_a_way_to_the_host():
    wrong = complaint(checkpoint={"asynchronous": True})
    assert "snapshot_bandwidth" in wrong


def test_one_replica_cannot_shrink():
    table = {"operations": {**OPERATIONS, "elastic": True}}
    with pytest.raises(DescriptionError, match=r"plan\.dp 1 has no replica to spare"):
        operate(sim.load("gpt2-xl-1gpu", table), seeds=1)


def test_a_restart_warms_up_too():
    o = operate(load(changed(restart_time="5 min"), **{"run.warm_up": "40 s"}), seeds=1)
    assert o.job.restart == 340 * 10**9
    assert "5.667 min to start (run.warm_up, 40 s, with it)" in str(o)


def test_more_checkpoints_than_can_be_run_are_refused():
    assert "are too many" in complaint(
        checkpoint={"interval": "1 us", "write_time": "1 us"}, step_time="1 us"
    )


def test_two_components_of_one_name_are_refused():
    with pytest.raises(DescriptionError, match="two of them have the name 'part'"):
        operate(load({**OPERATIONS, "components": [PART, PART]}), seeds=1)


def test_a_scenario_without_operations_is_refused():
    with pytest.raises(DescriptionError, match=r"no \[operations\] table"):
        operate(sim.load("gpt2-xl-ddp"))


# --- energy and money ---------------------------------------------------------------------------


def h100(**cost):
    return sim.load("gpt2-xl-ddp", {"cluster.node": "dgx-h100", "cost": {**COST, **cost}})


def test_a_device_draws_what_its_time_is_spent_on():
    # half computing at 700 W, a third communicating at 350 W, a sixth idle at 70 W
    watts = device_power(h100(), Cost(), (1 / 2, 1 / 3, 1 / 6))
    assert watts == pytest.approx(350 + 350 / 3 + 70 / 6)


def test_energy_carbon_and_money_of_an_hour_by_hand():
    # (8 x 700 W + 1 kW) x 1 h x 1.2 = 7.92 kWh: 3.168 kg, $0.792; 8 devices x $2.50 = $20
    s = h100()
    b = bill(s, s.cost, (1, 0, 0), running=3600, idle=0)
    assert b.joules == pytest.approx(7.92 * 3.6e6)
    assert b.carbon_kg == pytest.approx(3.168)
    assert b.electricity_usd == pytest.approx(0.792)
    assert b.devices_usd == pytest.approx(20)


def test_spare_nodes_idle_but_are_paid_for():
    # one spare node: (8 x 70 W + 1 kW) x 1 h x 1.2 = 1.872 kWh more
    s = h100()
    alone, spared = (bill(s, s.cost, (1, 0, 0), 3600, 0, spare_nodes=n) for n in (0, 1))
    assert spared.joules - alone.joules == pytest.approx(1.872 * 3.6e6)
    assert spared.devices_usd == pytest.approx(40)


def test_metas_carbon_for_llama_3_1_405b_follows_from_its_hours():
    # The model card: 30.84 M device-hours at 700 W, 8,930 t: 30.84e6 x 0.7 kWh x 0.4137 kg/kWh
    s = sim.load("llama-3-405b-operations", {
        "cost": {"carbon_intensity": "413.66 g/kWh"}})  # fmt: skip
    hours = 30.84e6 / 16384
    b = bill(s, s.cost, (1, 0, 0), hours * 3600, 0)
    assert b.joules / 3.6e6 == pytest.approx(30.84e6 * 0.7)
    assert b.carbon_kg == pytest.approx(8.93e6, rel=1e-3)


def test_the_run_takes_what_its_seconds_take_and_a_million_tokens_their_share():
    s = load(**{"cluster.node": "dgx-h100", "cost": COST})
    o = operate(s, seeds=4)
    b = bills(o)
    # 8 devices for 5 days at $2.50 an hour
    assert b.run.devices_usd == pytest.approx(8 * 120 * 2.5)
    tokens = o.steps.mean() * 64 * 1024
    assert b.million_tokens.devices_usd == pytest.approx(2400 / tokens * 1e6)


def test_a_device_of_unknown_power_is_refused():
    with pytest.raises(DescriptionError, match="has no tdp; state it"):
        step_bills(sim.simulate(sim.load("gpt2-xl-ddp", {
            "cluster.node": "mi300x-8", "cost": COST, "run.precision": "bf16"})))  # fmt: skip


def test_the_energy_of_unlike_devices_is_refused():
    s = sim.load("llama-3-8b-a100-h100", {"cost": COST})
    with pytest.raises(DescriptionError, match="nodes of several kinds is not modelled"):
        device_power(s, s.cost, (1, 0, 0))


@pytest.mark.parametrize(("older", "newer"), [("dgx-1-v100", "dgx-a100"), ("dgx-a100", "dgx-h100"),
                                              ("dgx-h100", "dgx-b200")])  # fmt: skip
def test_each_generation_takes_less_energy_for_the_same_job(older, newer):
    def joules(node):
        s = sim.load("gpt2-xl-generations", {"cluster.node": node})
        return step_bills(sim.simulate(s))[1].joules

    assert joules(newer) < joules(older)


# --- the command --------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    text = (catalog.root() / "workloads/gpt2-xl-ddp.toml").read_text(encoding="utf-8")
    path = tmp_path / "days.toml"
    path.write_text(
        text
        + """
[operations]
step_time = "1 s"
[operations.checkpoint]
interval = "10 min"
write_time = "60 s"
[[operations.components]]
name = "part"
mtbf = "5 h"
per = "cluster"
takes_node = false
""",
        encoding="utf-8",
    )
    return path


def test_the_command_prints_a_table_and_writes_json_and_a_figure(trainsim, file, tmp_path):
    figure, report = tmp_path / "goodput.png", tmp_path / "report.json"
    code, out, _ = trainsim(
        "operate", str(file), "--days", "5", "--seeds", "20", "--json", str(report),
        "--plot", str(figure), "--intervals",
    )  # fmt: skip
    assert code == 0
    assert "effective training time" in out
    assert "best by simulation" in out
    assert figure.read_bytes().startswith(b"\x89PNG")
    document = json.loads(report.read_text(encoding="utf-8"))
    assert document["days"] == 5
    assert len(document["samples"]["goodput"]) == 20
    shares = document["share_of_wall_clock"]
    assert sum(one["mean"] for one in shares.values()) == pytest.approx(1)
    assert document["best_interval"]["best_s"] > 0


def test_the_command_gives_the_same_bytes_again(trainsim, file):
    first, again = (
        trainsim("operate", str(file), "--seeds", "5", "--json", "-")[1] for _ in range(2)
    )
    assert first == again


def test_a_wrong_description_ends_the_command_with_2(trainsim, file):
    code, _, err = trainsim("operate", str(file), "--set", "operations.checkpoint.interval=dally")
    assert code == 2
    assert "did you mean 'daly'?" in err


def test_a_run_says_what_a_step_takes_where_it_is_asked_to(trainsim):
    code, out, _ = trainsim("run", "gpt2-xl-ddp", "--set", "cost.pue=1.1")
    assert code == 0
    assert "takes" in out
    assert "1.1 times" in out


def test_a_figure_has_a_row_for_each_loss():
    from simulator.operate.plot import goodput_figure

    o = operate(load(), seeds=3)
    labels = [text.get_text() for text in goodput_figure(o).axes[0].get_yticklabels()]
    assert labels == ["wall clock", "checkpoint", "lost work", "restore", "training"]
