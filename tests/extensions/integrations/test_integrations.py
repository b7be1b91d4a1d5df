"""Callbacks in real trainings, requests that real schedulers take; the code is the page's own."""

import io
import json
import math
import re
from pathlib import Path
from statistics import median

import pandas as pd
import pytest
import torch
import yaml

import trappm
from trappm.extensions.integrations.forecast import FirstStep, forecast
from trappm.extensions.integrations.gpu_requests import PRODUCTS, pod, ray_options, yaml_text
from trappm.extensions.integrations.tracked_runs import write_runs
from trappm.extensions.integrations.training_watch import PROTOCOL, RecordedSteps
from trappm.profiler.devices.catalogue import memory_mib
from trappm.profiler.errors import InputError, UnknownArchitectureError
from trappm.profiler.models import zoo
from trappm.profiler.records import Configuration, Precision
from trappm.store import Home, Store

PAGE = (Path(__file__).parents[3] / "docs/integrations.md").read_text()


def run_page(title):
    """Runs the Python of a section as it stands there; what it leaves."""
    section = re.search(rf"^## {title}$(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    names = {"__name__": "page"}
    exec(re.search(r"```python\n(.*?)```", section[1], re.DOTALL)[1], names)  # noqa: S102
    return names


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sentences(capsys):
    return [x for x in capsys.readouterr().out.splitlines() if x.startswith("TraPPM: ")]


def check_added(command, folder, architecture):
    """Adds the recorded file, twice, and gives what the store then has."""
    status, out, err = command("labels", "import", folder / "steps.jsonl", "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["new"] == 1
    assert json.loads(command("labels", "import", folder / "steps.jsonl", "--json")[1])["new"] == 0
    with Store.open(Home.open().database_url) as store:
        (label,) = store.labels.matching()
        record = next(store.measurements.each(trappm.store.LabelFilter()))
        pair = (architecture, label.configuration.input_size)
        assert store.labels.of_pairs([pair], label.configuration, label.device) == []
    assert (label.provenance, label.protocol) == ("imported", "in-training")
    assert label.step_time_ms == pytest.approx(median(record.step_samples_ms))
    assert record.environment["source"] == "recorded in training"
    assert "measuring_version" not in record.environment
    return label.configuration


def test_lightning_callback_forecasts_and_records(folder, capsys, command):
    pytest.importorskip("lightning", reason="the extra integrations is not installed")
    run_page("Lightning")
    before = sentences(capsys)[0]
    (line,) = (folder / "steps.jsonl").read_text().splitlines()
    assert re.match(
        r"TraPPM: Fits cpu-\d+t: \d+ MiB \(\d+ to \d+\) of [\d.]+ GiB for resnet10t in fp32 at "
        r"batch 4",
        before,
    )
    assert len(json.loads(line)["step_samples_ms"]) == 11
    assert check_added(command, folder, "resnet10t") == Configuration(
        architecture="resnet10t", batch_size=4, input_size=64
    )


def test_lightning_trains_at_the_largest_batch_that_fits(capsys):
    lightning = pytest.importorskip("lightning", reason="the extra integrations is not installed")
    from trappm.extensions.integrations.lightning_callback import LargestBatch

    trained = []

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = zoo.create_model("resnet10t", 64)

        def forward(self, images, weights=None):
            made = self.net(images)
            return made if weights is None else made * weights

        def training_step(self, images, _):
            return self(images.to(next(self.parameters()).dtype)).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    class Data(lightning.LightningDataModule):
        batch_size = 2

        def train_dataloader(self):
            trained.append(self.batch_size)
            return torch.zeros(1, 2, 3, 64, 64)

    def fit(name, device, precision="32-true", most=100_000, **data):
        trainer = lightning.Trainer(
            callbacks=[LargestBatch(name, device, most=most)], max_steps=1, precision=precision,
            accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, **(data or {"datamodule": Data()}))
        return trained.pop() if trained else None, sentences(capsys)[-1]

    module = Classifier()
    stays = "TraPPM: batch_size stays as it is: "
    assert fit(None, "v100") == (2, f"{stays}the module has no example_input_array")
    module.example_input_array = (torch.zeros(4, 3, 64, 64), torch.zeros(4, 1))
    for name in (None, "resnet10t"):
        size, line = fit(name, "v100")
        assert line == f"TraPPM: batch_size is {size:,}, the largest predicted to fit"
        assert fit(name, "v100", most=size - 1) == (
            size - 1, f"TraPPM: batch_size is {size - 1:,}, of {size:,} predicted to fit"
        )  # fmt: skip
    assert fit("resnet10t", "a100", "bf16-true")[1] != fit("resnet10t", "a100")[1]
    cpu = f"cpu-{torch.get_num_threads()}t"
    assert fit(None, None) == (2, f"{stays}there is no prediction on {cpu}")
    loader = torch.zeros(1, 2, 3, 64, 64)
    assert fit(None, "v100", train_dataloaders=loader)[1].startswith(f"{stays}the data loaders")
    module.example_input_array = ()
    assert fit(None, "v100")[1].startswith(stays)
    with pytest.raises(UnknownArchitectureError, match="resnet5o"):
        LargestBatch("resnet5o")


def test_runs_of_mlflow_become_labels(folder, command):
    pytest.importorskip("mlflow", reason="MLflow is not installed: two dozen packages")
    run_page("MLflow and Weights & Biases")
    assert json.loads(command("labels", "import", folder / "steps.jsonl", "--json")[1])["new"] == 1


def test_predicted_energy_has_the_unit_of_codecarbon():
    output = pytest.importorskip("codecarbon.output", reason="CodeCarbon is not installed")
    assert "gpu_energy" in output.EmissionsData.__dataclass_fields__  # in kWh
    answer = trappm.predict("resnet18", device="rtx3090", batch_size=64, epochs=1, samples=64_000)
    assert answer.run.energy_kwh == pytest.approx(1000 * answer.energy_j / 3.6e6)


EXPORT = """Name,State,arch,bs,step (ms),peak MiB
a,finished,resnet50,64,187.5,8000
b,finished,resnet18,32,,3000
c,crashed,resnet18,4096,9.9,
d,finished,resnet18,16,,
"""
COLUMNS = {
    "architecture": "arch",
    "batch_size": "bs",
    "step_time_ms": "step (ms)",
    "memory_mib": "peak MiB",
}
SHARED = {"device": "NVIDIA A100-SXM4-40GB", "input_size": 224, "precision": "amp-bf16"}


def imported(command, folder):
    return json.loads(command("labels", "import", folder / "steps.jsonl", "--json")[1])["new"]


def test_exported_runs_of_wandb_become_labels_that_train_no_model(folder, command):
    runs = pd.read_csv(io.StringIO(EXPORT))
    assert write_runs(runs, "steps.jsonl", COLUMNS, **SHARED) == 2
    assert [imported(command, folder) for _ in range(2)] == [2, 0]
    with Store.open(Home.open().database_url) as store:
        labels = store.labels.matching()
        assert store.labels.of_pairs(
            [("resnet50", 224)], labels[0].configuration, labels[0].device
        ) == []  # fmt: skip
    assert {(x.configuration.architecture, x.step_time_ms, x.memory_mib) for x in labels} == {
        ("resnet50", 187.5, 8000.0), ("resnet18", None, 3000.0)
    }  # fmt: skip
    assert {(x.device, x.protocol, x.provenance) for x in labels} == {
        ("a100", "in-training", "imported")
    }


def test_a_run_is_imported_once_although_other_runs_have_more_columns(folder, command):
    """As `mlflow.search_runs`, whose frame has the columns of all runs, and text as parameters."""
    run = {"run_id": "r1", "status": "FINISHED", "params.arch": "resnet50", "params.bs": "64",
           "start_time": pd.Timestamp("2026-11-28", tz="UTC"), "metrics.ms": 187.5}  # fmt: skip
    columns = {
        "architecture": "params.arch", "batch_size": "params.bs", "step_time_ms": "metrics.ms"
    }  # fmt: skip
    later = {**run, "run_id": "r2", "params.lr": "0.1", "params.bs": "32", "start_time": pd.NaT}
    unfinished = {**run, "run_id": "r3", "status": "RUNNING"}
    for new, runs in ((1, [run]), (1, [run, later, unfinished]), (0, [later])):
        (folder / "steps.jsonl").unlink(missing_ok=True)
        write_runs(pd.DataFrame(runs), "steps.jsonl", columns, **SHARED)
        assert imported(command, folder) == new
    (folder / "steps.jsonl").unlink()
    write_runs(pd.DataFrame([run]), "steps.jsonl", columns, **{**SHARED, "device": "v100"})
    assert imported(command, folder) == 1  # a corrected device is another label


def test_runs_without_a_label_write_no_file(folder):
    for runs in (pd.DataFrame(), pd.read_csv(io.StringIO(EXPORT)).tail(2)):
        assert write_runs(runs, "steps.jsonl", COLUMNS, **SHARED) == 0
    assert not (folder / "steps.jsonl").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"columns": {**COLUMNS, "batch": "bs"}}, "unknown: batch; fields: device, architecture"),
        ({"columns": {**COLUMNS, "memory_mib": "peak"}}, "lack the columns peak"),
        ({"columns": {"architecture": "arch"}}, "no figure has a column; name one for step_time"),
        ({"batch_size": 8}, "batch_size has a column and a shared value"),
        ({"input_size": None}, "row 0 of the runs: input_size is missing"),
        ({"input_size": 224.5}, "row 0 of the runs: input_size is 224.5; it must be a whole"),
        ({"precision": "int3"}, "row 0 of the runs: precision is 'int3'"),
        ({"arch": "my_net"}, "row 0 of the runs: "),
        ({"arch": None}, "row 0 of the runs: architecture is missing"),
        ({"bs": "many"}, "row 0 of the runs: batch_size is 'many'"),
        ({"step (ms)": -1.0}, "row 0 of the runs: step_time_ms is -1.0"),
    ],
)
def test_wrong_runs_are_refused_and_write_nothing(folder, change, message):
    runs = pd.read_csv(io.StringIO(EXPORT)).head(1).astype(object)
    shared = {**SHARED, "columns": COLUMNS}
    for name, value in change.items():
        if name in runs:
            runs[name] = value
        else:
            shared[name] = value
    with pytest.raises(InputError, match=re.escape(message)):
        write_runs(runs, "steps.jsonl", **{k: v for k, v in shared.items() if v is not None})
    assert not (folder / "steps.jsonl").exists()


@pytest.mark.extension("transformers")
def test_transformers_callback_forecasts_and_records(folder, capsys, command):
    pytest.importorskip("transformers", reason="the extra transformers is not installed")
    pytest.importorskip("accelerate", reason="the extra integrations is not installed")
    run_page("Transformers' Trainer")
    before, *_, last = sentences(capsys)
    assert before.startswith("TraPPM: Fits cpu-")
    assert "for hf:gpt2-tiny in fp32 at batch 2" in before
    assert last.endswith("import the label with: trappm labels import steps.jsonl")
    assert check_added(command, folder, "hf:gpt2-tiny") == Configuration(
        architecture="hf:gpt2-tiny", batch_size=2, input_size=64, optimizer="adamw"
    )


def first_step(size, compiled=False, **changes):
    """The first step of a training of test_resnet on a CPU."""
    module = zoo.create_model("test_resnet", size)
    return FirstStep(
        model=torch.compile(module) if compiled else module, name="test_resnet",
        args=(torch.empty(16, 3, size, size),), precision=Precision.FP32, epoch_batches=None,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
        device=torch.device("cpu"), **changes,
    )  # fmt: skip


@pytest.mark.parametrize("compiled", ["", "module", "by the trainer"])
def test_compiled_model_gives_a_label_of_its_own(folder, compiled):
    first = first_step(64, compiled == "module", will_compile=compiled == "by the trainer")
    steps = RecordedSteps(framework="a test")
    for _ in range(PROTOCOL.warmup_steps + PROTOCOL.min_steps):
        steps.begin()
        steps.end(first)
    record = steps.write(first, folder / "steps.jsonl")
    assert record.configuration.execution == ("compile" if compiled else "eager")


@pytest.mark.parametrize("compiled", ["module", "by the trainer"])
def test_a_compiled_model_has_a_forecast_of_its_own(folder, compiled):
    first = first_step(64, compiled == "module", will_compile=compiled == "by the trainer")
    of_eager, of_compiled = (
        str(forecast(step, "a100")) for step in (first_step(64), first)
    )  # fmt: skip
    assert "for test_resnet in fp32 at batch 16" in of_eager
    assert "for test_resnet in fp32, compiled, at batch 16" in of_compiled
    assert "a step is predicted to take" in of_compiled
    on_cpu = str(forecast(first, "cpu-2t"))
    assert "the step is compiled, and this forecast is for eager mode" in on_cpu


def test_unnamed_module_is_timed_but_not_recorded(folder, capsys):
    lightning = pytest.importorskip("lightning", reason="the extra integrations is not installed")
    from trappm.extensions.integrations.lightning_callback import TrappmCallback

    class Line(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x):
            return self.layer(x)

        def training_step(self, batch, _):
            return self(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    def fit(callback, **options):
        trainer = lightning.Trainer(
            **options, max_epochs=1, accelerator="cpu", devices=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, callbacks=[callback],
        )  # fmt: skip
        trainer.fit(Line(), torch.utils.data.DataLoader(torch.randn(40, 8), batch_size=2))
        return sentences(capsys)

    before, after = fit(TrappmCallback(device="a100"))
    assert before.startswith("TraPPM: Fits A100 40 GB: 1.7 GiB (")
    assert ") of 39.6 for Line in fp32 at batch 2" in before
    assert before.endswith("after some steps: the model has no timm or hf: name")
    assert re.search(r"a step takes [\d.]+ ms, an epoch about 0 s \(measured over 10 steps", after)
    assert list(folder.glob("*.jsonl")) == []
    *_, last = fit(TrappmCallback("resnet10t", "steps.jsonl", device="no-card"))
    assert "parameters of Line differ from resnet10t" in last
    assert not Path("steps.jsonl").exists()
    (line,) = fit(TrappmCallback(), precision="64-true")
    assert "neither forecast nor timed: unsupported precision 64-true" in line
    with pytest.raises(InputError, match="record_to needs a timm or hf: model_name"):
        TrappmCallback(record_to="steps.jsonl")
    with pytest.raises(InputError, match="resnet18"):
        TrappmCallback("resnet188")


def test_ray_accepts_the_options(folder):
    options = run_page("Ray")["options"]
    assert 0 < options["num_gpus"] < 1
    assert options["memory"] >= 4 << 30
    too_large = trappm.predict("resnet10t", input_size=64, device="a100", batch_size=60_000)
    with pytest.raises(InputError, match="lower the batch size"):
        ray_options(too_large)


def test_kubernetes_client_parses_the_pod(folder):
    client = pytest.importorskip("kubernetes.client", reason="kubernetes is not installed")
    names = run_page("Kubernetes")
    manifest = names["manifest"]
    assert yaml.safe_load(names["yaml_text"](manifest)) == manifest
    read = client.ApiClient().deserialize(json.dumps(manifest), "V1Pod", "application/json")
    assert client.ApiClient().sanitize_for_serialization(read) == manifest
    (container,) = read.spec.containers
    assert container.resources.limits == {"nvidia.com/gpu": "1"}
    assert container.resources.requests["memory"].endswith("Mi")
    wanted = read.spec.affinity.node_affinity.required_during_scheduling_ignored_during_execution
    (rule,) = wanted.node_selector_terms[0].match_expressions
    assert "NVIDIA-A100-SXM4-40GB" in rule.values
    assert "Tesla-V100-SXM2-16GB" not in rule.values  # 256 images take more than 16 GB


def test_pod_requests_only_fitting_gpus(folder):
    assert [product for product in PRODUCTS if memory_mib(product) is None] == []
    asked = {"batch_size": 8, "input_size": 64}
    with pytest.raises(InputError, match="no Kubernetes product name is known for titan-v"):
        pod(trappm.compare("resnet10t", "titan-v", **asked))
    one = trappm.predict("resnet10t", device="t4", **asked)
    assert pod(one) == pod([one])
    with pytest.raises(InputError, match="does not fit t4"):
        pod(trappm.compare("resnet10t", "t4", **(asked | {"batch_size": 60_000})))


@pytest.mark.parametrize(
    ("scheduler", "key"),
    [
        ("hami", "nvidia.com/gpumem"),
        ("kai", "gpu-memory"),
        ("volcano", "volcano.sh/vgpu-memory"),
    ],
)
def test_pod_of_a_shared_gpu_requests_the_upper_bound_of_memory(folder, scheduler, key):
    asked = trappm.compare("resnet10t", ["v100", "a100"], batch_size=8, input_size=64)
    text = yaml_text(pod(asked, shared_by=scheduler))
    (requested,) = re.findall(rf" {re.escape(key)}: '(\d+)'$", text, re.MULTILINE)
    assert int(requested) == max(math.ceil(step.memory.high_mib) for step in asked)
    with pytest.raises(InputError, match="'slurm' is no scheduler that shares GPUs; known: hami"):
        pod(asked, shared_by="slurm")


def test_optuna_prunes_trials_that_do_not_fit(folder):
    trials = run_page("Optuna")["study"].trials
    states = {(trial.params["batch_size"], trial.state.name) for trial in trials}
    assert states == {(64, "COMPLETE"), (4096, "PRUNED")}
    for trial in trials:
        assert (trial.constraints["trappm_memory_mib"] > 0) is (trial.state.name == "PRUNED")


def test_skypilot_estimator_returns_seconds_by_gpu():
    pytest.importorskip("sky", reason="SkyPilot is not installed: a dozen packages, left to you")
    import sky

    names = run_page("SkyPilot")
    task = names["task"]
    slower = task.estimate_runtime(sky.Resources(accelerators="V100:1"))
    assert 3600 < names["seconds"] < slower
    for accelerators in ("A100:8", None):
        with pytest.raises(InputError, match="one GPU"):
            task.estimate_runtime(sky.Resources(accelerators=accelerators))


def test_callback_of_a_named_model_equals_predict():
    said = forecast(first_step(160), "a100").prediction
    predicted = trappm.predict(
        "test_resnet", input_size=160, batch_size=16, device="a100", precision="fp32",
        optimizer="momentum",
    )  # fmt: skip
    assert said.memory == pytest.approx(predicted.memory)
    assert (said.verdict, said.largest_batch) == (predicted.verdict, predicted.largest_batch)
