"""Callbacks in real trainings, and recipes of the page; the code is the page's own."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch
import yaml

import trappm
from trappm.extensions.integrations.forecast import (
    TrainingContext,
    TrainingMemory,
    forecast,
    fp32_of_process,
)
from trappm.extensions.integrations.training_watch import PROTOCOL, RecordedSteps
from trappm.profiler.models import zoo
from trappm.profiler.records import Configuration, Phase, Precision
from trappm.store import Home, Store

PAGE = (Path(__file__).parents[3] / "docs/integrations.md").read_text()


def run_page(title):
    """Runs the Python of a section as it stands there; what it leaves."""
    section = re.search(rf"^## {title}$(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    names = {"__name__": "page"}
    exec(re.search(r"```python\n(.*?)```", section[1], re.DOTALL)[1], names)  # noqa: S102
    return names


QUIET = {
    "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False,
    "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip


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
        (label,) = store.labels.find()
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
    assert "GiB for resnet10t in fp32 at batch 4" in before
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
            return self(images).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    class Data(lightning.LightningDataModule):
        batch_size = 2

        def train_dataloader(self):
            trained.append(self.batch_size)
            return torch.zeros(1, 2, 3, 64, 64)

    def fit(name, device, most=100_000, reserve=0.06, **data):
        callbacks = [LargestBatch(name, device, most=most, reserve=reserve)]
        trainer = lightning.Trainer(callbacks=callbacks, max_steps=1, **QUIET)
        trainer.fit(module, **(data or {"datamodule": Data()}))
        return trained.pop() if trained else None, sentences(capsys)[-1]

    module = Classifier()
    stays = "TraPPM: batch_size stays as it is: "
    assert fit(None, "v100") == (2, f"{stays}the module has no example_input_array")
    module.example_input_array = (torch.zeros(4, 3, 64, 64), torch.zeros(4, 1))
    size, line = fit("resnet10t", "v100")
    assert line == f"TraPPM: batch_size is {size:,}, the largest predicted to fit"
    less, line = fit(None, "v100", reserve=0.5)
    assert less < size
    step = trappm.predict(
        module, example_input=(torch.zeros(less, 3, 64, 64), torch.zeros(less, 1)), device="v100",
        precision="fp32", optimizer="sgd",
    )  # fmt: skip
    assert step.memory.high_mib <= 0.5 * step.capacity_mib
    assert fit(None, "v100", most=less - 1, reserve=0.5)[0] == less - 1
    loader = torch.zeros(1, 2, 3, 64, 64)
    assert fit(None, "v100", train_dataloaders=loader)[1].startswith(f"{stays}the data loaders")


@pytest.mark.extension("transformers")
def test_transformers_callback_forecasts_and_records(folder, capsys, command):
    pytest.importorskip("transformers", reason="the extra transformers is not installed")
    pytest.importorskip("accelerate", reason="the extra integrations is not installed")
    run_page("Transformers' Trainer")
    _, before, *_ = sentences(capsys)
    assert "for hf:gpt2-tiny in fp32 at batch 2" in before
    assert check_added(command, folder, "hf:gpt2-tiny") == Configuration(
        architecture="hf:gpt2-tiny", batch_size=2, input_size=64, optimizer="adamw"
    )


@pytest.mark.extension("transformers")
def test_trainer_takes_the_largest_batches_that_fit(folder, capsys):
    transformers = pytest.importorskip("transformers", reason="the extra is not installed")
    pytest.importorskip("accelerate", reason="the extra integrations is not installed")
    from trappm.extensions.integrations.transformers_callback import set_largest_batch

    config = transformers.GPT2Config(
        n_embd=64, n_layer=1, n_head=1, vocab_size=512, n_positions=256
    )
    texts = [{"input_ids": ids, "labels": ids} for ids in torch.randint(512, (2, 256))]
    arguments = transformers.TrainingArguments(
        output_dir="out", report_to=[], use_cpu=True, eval_strategy="epoch", max_steps=1,
        per_device_eval_batch_size=10**6, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=transformers.GPT2LMHeadModel(config), args=arguments, train_dataset=texts,
        eval_dataset=texts,
    )  # fmt: skip

    def sizes(**options):
        set_largest_batch(trainer, device="v100", **options)
        return arguments.per_device_train_batch_size, arguments.per_device_eval_batch_size

    train, evaluated = sizes(most=10**6)
    assert 8 < train < evaluated < 10**6
    assert sentences(capsys)[-1].startswith(
        f"TraPPM: per_device_eval_batch_size is {evaluated:,}, "
    )
    assert sizes(most=2)[0] == 2
    assert sentences(capsys)[-1].startswith("TraPPM: per_device_train_batch_size is 2, of ")
    trainer.train()
    assert trainer.state.train_batch_size == 2


TRAINER = """
import json, sys
from trappm.profiler.models import zoo
import torch, transformers
from trappm.extensions.integrations.transformers_callback import set_largest_batch
config = transformers.GPT2Config(
    n_embd=64, n_layer=1, n_head=1, vocab_size=512, n_positions=256
)
texts = [{"input_ids": ids, "labels": ids} for ids in torch.randint(512, (8, 32))]
arguments = transformers.TrainingArguments(
    output_dir="out", report_to=[], use_cpu=True, ddp_backend="gloo", eval_strategy="epoch",
    per_device_eval_batch_size=10**6, disable_tqdm=True, save_strategy="no", num_train_epochs=1,
    accelerator_config={"dispatch_batches": json.loads(sys.argv[1])},
)
trainer = transformers.Trainer(
    model=transformers.GPT2LMHeadModel(config), args=arguments, train_dataset=texts,
    eval_dataset=texts,
)
random = torch.get_rng_state()
set_largest_batch(trainer, device="v100", most=2)
evaluated, arguments.per_device_eval_batch_size = arguments.per_device_eval_batch_size, 4
assert torch.equal(random, torch.get_rng_state())
trainer.train()
losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
row = [arguments.per_device_train_batch_size, evaluated, trainer.state.global_step, losses]
open(f"rank{arguments.process_index}.json", "w").write(json.dumps(row))
"""


@pytest.mark.slow
@pytest.mark.extension("transformers")
@pytest.mark.parametrize("dispatches", ["false", "true"])
def test_both_processes_of_ddp_train_at_the_sizes_of_the_first(folder, dispatches):
    """Two processes over gloo; in the second case the first process reads all batches."""
    pytest.importorskip("transformers", reason="the extra transformers is not installed")
    pytest.importorskip("accelerate", reason="the extra integrations is not installed")
    (folder / "train.py").write_text(TRAINER)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run(
        [*launch, "train.py", dispatches], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("TraPPM: per_device_train_batch_size is 2, of ") == 1
    first, second = (json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2))
    train, evaluated, steps, losses = first
    assert (train, steps, len(losses)) == (2, 2, 1)
    assert 8 < evaluated < 10**6
    assert second == first


def test_ddp_and_evaluation_need_memory_of_their_own(folder):
    """Of a large layer, whose gradients and states are most of the memory."""
    layer = torch.nn.Linear(16384, 16384, device="meta")
    alone = TrainingContext(
        model=layer, name=None, args=(torch.empty(8, 16, 16384),), precision=Precision.FP32,
        optimizer=torch.optim.Adam(layer.parameters()), epoch_batches=None,
        device=torch.device("cpu"),
    )  # fmt: skip

    def largest(context, *phases):
        return TrainingMemory(context, "v100").largest_batch(0.06, phases)

    parallel, freeing = replace(alone, processes=2), replace(alone, frees_gradients=True)
    train, evaluated = largest(alone, Phase.TRAIN), largest(alone, Phase.INFER)
    assert largest(parallel, Phase.TRAIN) < train
    assert largest(parallel, Phase.INFER) < evaluated < largest(freeing, Phase.INFER)
    assert largest(alone, Phase.TRAIN, Phase.INFER) == min(train, evaluated)


def first_step(size, compiled=False, **changes):
    """The first step of a training of test_resnet on a CPU."""
    module = zoo.create_model("test_resnet", size)
    return TrainingContext(
        model=torch.compile(module) if compiled else module, name="test_resnet",
        args=(torch.empty(16, 3, size, size),), precision=Precision.FP32, epoch_batches=None,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
        device=torch.device("cpu"), **changes,
    )  # fmt: skip


@pytest.mark.parametrize("compiled", ["module", "by the trainer"])
def test_compiled_model_has_a_label_and_a_forecast_of_its_own(folder, compiled):
    first = first_step(64, compiled == "module", will_compile=compiled == "by the trainer")
    steps = RecordedSteps(framework="a test")
    for _ in range(PROTOCOL.warmup_steps + PROTOCOL.min_steps):
        steps.begin()
        steps.end(first)
    record = steps.write(first, folder / "steps.jsonl")
    assert record.configuration.execution == "compile"
    assert "for test_resnet in fp32, compiled, at batch 16" in str(forecast(first, "a100"))
    assert "this forecast is for eager mode" in str(forecast(first, "cpu-2t"))


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
        trainer = lightning.Trainer(**options, max_epochs=1, callbacks=[callback], **QUIET)
        trainer.fit(Line(), torch.utils.data.DataLoader(torch.randn(40, 8), batch_size=2))
        return sentences(capsys)

    before, _ = fit(TrappmCallback(device="a100"))
    assert before.startswith("TraPPM: Fits A100 40 GB: 779 MiB (")
    assert list(folder.glob("*.jsonl")) == []
    *_, last = fit(TrappmCallback("resnet10t", "steps.jsonl", device="no-card"))
    assert "parameters of Line differ from resnet10t" in last
    assert not Path("steps.jsonl").exists()
    (line,) = fit(TrappmCallback(), precision="64-true")
    assert "neither forecast nor timed: unsupported precision 64-true" in line


def test_ray_gets_a_share_of_the_gpu(folder):
    names = run_page("Ray")
    assert 0 < names["share"] < 1
    assert names["train"]._default_options["num_gpus"] == names["share"]


def test_the_pod_runs_where_the_step_fits(folder, capsys):
    run_page("Kubernetes")
    pod = yaml.safe_load(capsys.readouterr().out)
    affinity = pod["spec"]["affinity"]["nodeAffinity"]
    wanted = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    # On a V100, 256 images take more than its 16 GB.
    assert wanted[0]["matchExpressions"][0]["values"] == ["NVIDIA-A100-SXM4-40GB"]


def test_optuna_prunes_trials_that_do_not_fit(folder):
    trials = run_page("Optuna")["study"].trials
    states = {(trial.params["batch_size"], trial.state.name) for trial in trials}
    assert states == {(64, "COMPLETE"), (4096, "PRUNED")}
    for trial in trials:
        assert (trial.constraints["trappm_memory_mib"] > 0) is (trial.state.name == "PRUNED")


def test_precision_in_fp32_is_that_of_the_process():
    """Whichever of PyTorch's ways has set it."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    assert fp32_of_process() is Precision.FP32
    try:
        torch.set_float32_matmul_precision("high")
        assert fp32_of_process() is Precision.TF32
        torch.set_float32_matmul_precision("highest")
        cudnn.allow_tf32 = False
        assert fp32_of_process() is Precision.FP32_STRICT
        matmul.fp32_precision = "tf32"
        assert fp32_of_process() is Precision.TF32
    finally:
        matmul.fp32_precision = "ieee"
        torch.set_float32_matmul_precision("highest")
        cudnn.allow_tf32 = True
