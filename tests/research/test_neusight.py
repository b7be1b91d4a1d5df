"""NeuSight's tables of kernels: what each row means, and rows that mean nothing."""

import gzip

import pytest

from research.importers.neusight import read_neusight
from research.priors.kernel_calls import KernelCall, Operator
from trappm.profiler.errors import InputError

HEAD = (
    "op,device,latency_ms,b,m,n,k,h,c_in,c_out,kernel_size,in_size,stride,padding,kernel,"
    "grid_blocks,block_threads,split,rep"
)
ROWS = {
    "bmm,V100-PCIE-32GB,0.11,384,128.0,64.0,128.0,,,,,,,,volta_sgemm,1536,256,test,0":
        KernelCall.of(Operator.MATMUL, batch=384, rows=128, depth=64, columns=128),
    "linear,V100-PCIE-32GB,1.11,1,1024.0,2560.0,512.0,,,,,,,,volta_sgemm,320,128,test,0":
        KernelCall.of(Operator.LINEAR, batch=1, rows=1024, inputs=2560, outputs=512),
    "conv,A100-PCIE-80GB,0.96,38,,,,,893.0,326.0,3.0,5.0,1.0,1.0,implicit,330,64,train,0":
        KernelCall.of(
            Operator.CONV2D,
            batch=38, inputs=893, outputs=326, height=5, window=3, stride=1, groups=1,
        ),
    "ln,T4,0.8,32768,,,,1600.0,,,,,,,vectorized,1,1,test,0":
        KernelCall.of(Operator.LAYER_NORM, batch=32768, width=1600),
    "addu,T4,0.8,32768,,,,1600.0,,,,,,,vectorized,1,1,test,0":
        KernelCall.of(Operator.ADD_SCALAR, batch=32768, width=1600),
    "pow,T4,0.8,8,,,,16.0,,,,,,,vectorized,1,1,test,0":
        KernelCall.of(Operator.POWER, batch=8, width=16),
}  # fmt: skip


def table(tmp_path, *rows, head=HEAD, name="kernels.csv.gz"):
    path = tmp_path / name
    data = "\n".join((head, *rows, "")).encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


@pytest.mark.parametrize("name", ["kernels.csv.gz", "kernels.csv"])
def test_every_kind_of_row_becomes_a_call(tmp_path, name):
    read = [*read_neusight(table(tmp_path, *ROWS, name=name))]
    assert [row.call for row in read] == [*ROWS.values()]
    assert (read[0].device, read[0].time_ms) == ("v100-pcie-32gb", 0.11)


def test_different_gpus_with_one_name_are_separate(tmp_path):
    rows = [f"relu,A100-PCIE-{size}GB,0.8,8,,,,16,,,,,,,x,1,1,test,0" for size in (40, 80)]
    read = [*read_neusight(table(tmp_path, *rows))]
    assert [m.device for m in read] == ["a100-pcie-40gb", "a100-pcie-80gb"]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("fft,T4,0.8,8,,,,16,,,,,,,x,1,1,test,0", "op is 'fft'"),
        ("relu,T4,nan,8,,,,16,,,,,,,x,1,1,test,0", "latency_ms"),
        ("relu,T4,0.8,8,,,,,,,,,,,x,1,1,test,0", "h is ''"),
        ("relu,T4,0.8,8.5,,,,16,,,,,,,x,1,1,test,0", "whole"),
        ("conv,T4,0.9,3,,,,,8,3,3,5,1,0,x,1,1,test,0", "padding"),
    ],
)
def test_invalid_row_rejects_the_file(tmp_path, row, why):
    path = table(tmp_path, next(iter(ROWS)), row)
    with pytest.raises(InputError, match=rf"kernels.csv.gz, line \d: .*{why}.*nothing was"):
        list(read_neusight(path))
