"""What training and predicting cost a graph, beside the published code's loop.

    python benchmarks/learner/learner_speed.py [--graphs 60] [--preset paper]
    python benchmarks/learner/learner_speed.py --labels 5000     our heads, trained and asked
        [--threads 2]  (of products of matrices)

Takes graphs from the label store (`TRAPPM_HOME`; `trappm pool build` or `trappm evaluate` makes
them), one batch size each, so many that they are like a training set. CPU seconds of one thread are
counted, so a machine that others use tells nearly the same; per graph, and scaled to one of 483
nodes, the mean of the published data set, where its loop takes 0.097 s (autoencoder) and 0.109 s
(regressor). With --labels our heads of memory and step time are trained instead, on made-up labels
of so many configurations of those architectures; replaying steps that are new is counted by itself.
With all metrics, all heads are then trained once more as a campaign does: side by side, with one
thread for products each, and also that of step times which goes by the graph alone.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from trappm.learner.estimator import Targets
from trappm.learner.heads.device_heads import train_heads
from trappm.learner.heads.metric_head import Ours
from trappm.learner.networks.dataset import batches, fit_node_scaler, to_data
from trappm.learner.networks.distinct import classes_of
from trappm.learner.networks.gae import train_encoder
from trappm.learner.networks.presets import preset_named
from trappm.learner.networks.published import TrappmAsPublished, random_encoder
from trappm.learner.physics.device_specs import spec_of
from trappm.learner.physics.memory_prior import MemoryPrior
from trappm.learner.physics.step_time_prior import StepTimePrior
from trappm.learner.workload import Workload
from trappm.profiler.records import METRICS, Graph, GraphTemplate
from trappm.profiler.simulation.step_profile import StepProfile
from trappm.store import Home, Store

SPEC = spec_of("a100")
PRIORS = {"memory": MemoryPrior(), "step-time": StepTimePrior(SPEC)}
COLUMNS = {"memory": "memory_mib", "step-time": "step_time_ms"}
PUBLISHED_NODES = 483
PUBLISHED_S = {"autoencoder training": 0.097, "regressor training": 0.109}


def graphs_of_the_store(count: int, generator: np.random.Generator) -> list[Graph]:
    with Store.open_to_read(Home.find().database_url) as store:
        frame, _ = store.query_sql(
            "SELECT architecture, input_size FROM architecture_graphs "
            "WHERE graph_hash IS NOT NULL ORDER BY 1, 2",
            limit=100_000,
        )
        pairs = list(frame.itertuples(index=False, name=None))
        chosen = [pairs[i] for i in generator.permutation(len(pairs))[:count]]
        templates = store.workloads.graph_templates(chosen)
    sizes = generator.choice([8, 16, 32, 64, 128], len(templates))
    return [
        GraphTemplate.from_bytes(data).at(int(size))
        for (_, data), size in zip(sorted(templates.items()), sizes, strict=True)
    ]


def labelled_workloads(
    count: int, architectures: int, generator: np.random.Generator
) -> tuple[list[Workload], list[str]]:
    """So many configurations of architectures whose steps the store knows, and their names."""
    with Store.open_to_read(Home.find().database_url) as store:
        frame, _ = store.query_sql(
            "SELECT architecture, input_size FROM step_profiles WHERE profile IS NOT NULL "
            "ORDER BY 1, 2",
            limit=100_000,
        )
        pairs = list(frame.itertuples(index=False, name=None))
        chosen = [pairs[i] for i in generator.permutation(len(pairs))[:architectures]]
        templates, steps = (
            store.workloads.graph_templates(chosen),
            store.workloads.step_profiles(chosen),
        )
    workloads, groups = [], []
    for pair, data in templates.items():
        template, step = GraphTemplate.from_bytes(data), StepProfile.from_bytes(steps[pair])
        for batch_size in range(1, 1 + -(-count // len(templates)) if step.kernels else 1):
            graph = template.at(batch_size)
            workloads.append(Workload(graph=graph, step=step, kernels=step.kernels))
            groups.append(pair[0])
    drawn = generator.permutation(len(workloads))[:count]
    return [workloads[i] for i in drawn], [groups[i] for i in drawn]


def our_heads(
    count: int, architectures: int, metrics: Sequence[str], generator: np.random.Generator
) -> None:
    """Trains our heads on labels that nearly follow their priors, and prints what that costs."""
    workloads, names = labelled_workloads(count, architectures, generator)
    read_mib = peak_mib()
    print(
        f"{len(workloads):,} labels of {len(set(names))} architectures, CPU time and, of training, "
        f"the clock's with {torch.get_num_threads()} threads;\n"
        f"graphs and profiles of all of them take up to {read_mib:,.0f} MiB"
    )
    print(
        f"{'':12}{'simulated':>10}{'trained':>9}{'by the clock':>14}{'one by one':>12}"
        f"{'in a batch':>14}{'peak':>12}"
    )
    taught = np.full((len(workloads), len(METRICS)), np.nan)
    for metric in metrics:
        prior = PRIORS[metric]
        started = time.process_time()
        logs = prior.log_values(workloads) + 0.05 * generator.standard_t(4, len(workloads))
        prior.suited(workloads, logs)  # replays some labels in other training loops, too
        simulated_s = time.process_time() - started
        targets = Targets(np.exp(logs), np.full(len(workloads), np.nan), names)
        taught[:, list(METRICS).index(COLUMNS[metric])] = targets.values
        started, by_clock = time.process_time(), time.perf_counter()
        head = Ours(prior).fit(workloads, targets, generator)
        trained_s, clock_s = time.process_time() - started, time.perf_counter() - by_clock
        many_s = cpu_seconds(lambda h=head: h.predict(workloads)) / len(workloads)
        singly = [cpu_seconds(lambda w=w, h=head: h.predict([w])) for w in workloads[:200]]
        print(
            f"{metric:12}{simulated_s:8.1f} s{trained_s:7.1f} s{clock_s:12.1f} s"
            f"{1e3 * float(np.median(singly)):9.2f} ms{1 / many_s:12,.0f}/s{peak_mib():8,.0f} MiB"
        )
    if set(metrics) < set(PRIORS):
        return
    started, by_clock = time.process_time(), time.perf_counter()
    train_heads(
        workloads, taught, groups=names, preset=preset_named("laptop").head, generator=generator,
        spec=SPEC,
    )  # fmt: skip
    trained_s, clock_s = time.process_time() - started, time.perf_counter() - by_clock
    print(f"{'all heads':12}{'':10}{trained_s:7.1f} s{clock_s:12.1f} s")


def peak_mib() -> float:
    """The most memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def cpu_seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--graphs", type=int, default=60)
    parser.add_argument("--preset", default="paper")
    parser.add_argument("--labels", type=int, help="train our heads on so many labels instead")
    parser.add_argument("--metric", choices=PRIORS, action="append", help="of these heads only")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    generator = np.random.default_rng(0)
    if given.labels:
        our_heads(given.labels, given.graphs, given.metric or list(PRIORS), generator)
        return
    graphs = graphs_of_the_store(given.graphs, generator)
    preset = preset_named(given.preset)
    nodes = float(np.mean([graph.node_count for graph in graphs]))
    print(f"{len(graphs)} graphs of {nodes:.0f} nodes on average, preset {preset.name}, one thread")

    scaler = fit_node_scaler(graphs)
    batch = next(batches([to_data(g, scaler) for g in graphs], 10**9, range(len(graphs))))
    distinct = [len(layer.counts) / batch.num_nodes for layer in classes_of(batch, 4).layers]
    print("distinct nodes by layer: " + ", ".join(f"{100 * share:.0f} %" for share in distinct))

    def epoch(batch_nodes: int) -> int:
        return max(1, round(nodes * len(graphs) / batch_nodes))

    one = replace(preset.encoder, steps=epoch(preset.encoder.batch_nodes))
    train_encoder(graphs[:4], one, generator)  # what loads on first use does not count
    random = random_encoder(graphs, preset.encoder, generator)
    workloads = [Workload(graph=graph) for graph in graphs]
    targets = Targets(
        values=np.exp(generator.normal(5.0, 1.0, len(graphs))),
        above=np.full(len(graphs), np.nan),
        groups=[str(i) for i in range(len(graphs))],
    )
    steps = epoch(preset.head.batch_nodes)
    published = TrappmAsPublished("once", replace(preset.head, steps=steps), random)
    embedding_s = cpu_seconds(lambda: published.embed(graphs))
    model = published.fit(workloads, targets, generator)
    epochs = 3  # of few steps: training cannot end before it has looked back ten times
    longer = TrappmAsPublished("longer", replace(preset.head, steps=(1 + epochs) * steps), random)
    longer.embed(graphs)
    once_s = cpu_seconds(lambda: published.fit(workloads, targets, generator))
    more_s = cpu_seconds(lambda: longer.fit(workloads, targets, generator))
    measured = {
        "autoencoder training": cpu_seconds(lambda: train_encoder(graphs, one, generator)),
        "regressor training": (more_s - once_s) / epochs,
        "embedding, once": embedding_s,
    }
    print(f"{'':24}CPU ms a graph   at {PUBLISHED_NODES} nodes   graphs/s   share of published")
    for name, seconds in measured.items():
        each = seconds / len(graphs)
        scaled = each * PUBLISHED_NODES / nodes
        share = f"{100 * scaled / PUBLISHED_S[name]:.0f} %" if name in PUBLISHED_S else ""
        print(f"{name:24}{1e3 * each:14.2f}{1e3 * scaled:15.2f}{1 / each:11.0f}   {share:>8}")

    several = cpu_seconds(lambda: model.predict(workloads)) / len(graphs)
    singly = [cpu_seconds(lambda w=w: model.predict([w])) for w in workloads]
    print(
        f"prediction from a cached graph: one by one {1e3 * float(np.median(singly)):.2f} ms "
        f"(95 % below {1e3 * float(np.percentile(singly, 95)):.2f}), in one batch "
        f"{1e3 * several:.2f} ms each, {1 / several:,.0f} a second"
    )


if __name__ == "__main__":
    main()
