"""Joint fits: kernels alone and steps are evidence for the same constants of many devices."""

from dataclasses import replace

import numpy as np
import torch
from kernel_samples import ROWS, error, moved, networks

from research.priors.joint_fit import Distribution, Evidence, HostedWorkload, JointFit, SharedPrior
from research.priors.kernel_calls import DataType, KernelCall, Operator, kernel_evidence
from trappm.learner.physics.step_time import StepTimePrior, spreads, starting_constants
from trappm.profiler.devices.catalogue import spec_of

torch.set_num_threads(1)

V100 = spec_of("v100")


def first():
    return Distribution.first(starting_constants(), spreads(1.0), of_devices=0.35)


def calls():
    """Products, streams and normalisations of many sizes, in 16 bits as the networks are."""
    result = []
    for size in (8, 16, 32, 64, 128):
        for wide in (128, 256, 512, 768, 1024):
            sizes = {"batch": size, "rows": 196, "inputs": wide, "outputs": wide}
            result.append(KernelCall.of(Operator.LINEAR, DataType.FP16, **sizes))
            result.append(KernelCall.of(Operator.RELU, DataType.FP16, batch=196 * size, width=wide))
    return result


def alone(prior, wanted, overhead_ms=0.03):
    """Kernels of a device as a source times them: its launch is inside each."""
    source = kernel_evidence("v100", "source", prior.spec, [(call, 1.0) for call in wanted])
    constants = prior.constants.clone()
    constants[ROWS["step"]] = np.log(overhead_ms / 0.1)
    values = StepTimePrior(prior.spec, constants).log_values(source.workloads)
    return replace(source, log_values=values)


def shifted(by, seed=0):
    """A V100 of other constants, whose bandwidth and peaks differ most."""
    constants = moved(StepTimePrior(V100), seed, spread=0.05).constants
    constants[ROWS["peak"]] += by
    constants[ROWS["bandwidth"]] += by
    return StepTimePrior(V100, constants)


def test_kernel_measurements_improve_step_times():
    truth = shifted(0.4)
    unseen = networks(20, seed=5)
    before = SharedPrior.like_others(V100, first())
    after = SharedPrior.like_others(V100, first(), [alone(truth, calls())])
    wanted = truth.log_values(unseen)
    assert error(after, unseen, wanted) < 0.65 * error(before, unseen, wanted)


def test_launch_overhead_of_a_source_is_not_attributed_to_the_device():
    truth = shifted(0.0)
    unseen = networks(20, seed=5)
    slow, quick = (
        SharedPrior.like_others(V100, first(), [alone(truth, calls(), overhead_ms)])
        for overhead_ms in (0.2, 0.01)
    )
    np.testing.assert_allclose(slow.log_values(unseen), quick.log_values(unseen), atol=0.1)


def test_overhead_is_learned_per_host():
    """Else what a slow host adds would be learned as an error of the model."""
    truth = shifted(0.2)
    slow = StepTimePrior(truth.spec, truth.constants.clone())
    slow.constants[ROWS["step"]] += 3.0
    seen, unseen = networks(40, seed=1), networks(20, seed=5)
    there = [HostedWorkload.of_host(w, "slow") for w in seen[::2]]
    labelled = [*(HostedWorkload.of_host(w, "quick") for w in seen), *there]
    values = np.concatenate([truth.log_values(seen), slow.log_values(there)])
    fitted = SharedPrior.like_others(V100, first()).refit(labelled, values)
    hosts = ("slow", "quick", "", "unknown")
    mixed = [HostedWorkload.of_host(w, host) for w in unseen for host in hosts]
    wanted = np.array([(slow if w.host == "slow" else truth).log_values([w])[0] for w in mixed])
    assert error(fitted, mixed, wanted) < 0.05
    np.testing.assert_allclose(fitted.features(mixed[:1]), fitted.features(mixed)[:1])


def test_similar_devices_improve_the_start_of_a_new_one():
    """From four similar devices, a fifth is predicted better than from its specification."""
    common = torch.from_numpy(np.random.default_rng(1).normal(size=len(starting_constants())))
    centre = starting_constants() + 0.3 * common
    devices = [moved(StepTimePrior(V100, centre), seed, spread=0.03) for seed in range(5)]
    evidence = [
        Evidence(f"gpu{i}", f"host{i}", V100, steps, prior.log_values(steps))
        for i, prior in enumerate(devices[:4])
        for steps in [networks(40, seed=i)]
    ]
    fit = JointFit(evidence, first(), learns=True)
    another = fit.of_another_device()
    unseen = networks(20, seed=9)
    wanted = devices[4].log_values(unseen)
    new = SharedPrior.like_others(V100, another)
    assert error(new, unseen, wanted) < 0.5 * error(StepTimePrior(V100), unseen, wanted)
