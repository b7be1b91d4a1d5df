"""Damages ONNX files at random and reads them; run by test_onnx_fuzz in a process of its own.

    python onnx_fuzzer.py CASE_FILE EXAMPLES SEED MODEL...

The file that is being read is left at CASE_FILE, so that a crash in native code leaves its cause.
"""

import resource
import signal
import sys
from pathlib import Path

import onnx
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from onnx import AttributeProto, TensorProto, helper

from trappm.profiler.errors import ModelFileError, UnsupportedModelError
from trappm.profiler.static_profile import file_profile

CASE, EXAMPLES, SEED = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
MODELS = [Path(name).read_bytes() for name in sys.argv[4:]]

MEMORY_BYTES = 1 << 30
"""What reading may allocate beside what the process has already."""
CPU_LIMIT_S = 20

NUMBERS = st.sampled_from(
    [0, 1, -1, 2, 3, 7, 64, 1000, -1000, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63)]
)
OPERATORS = st.sampled_from(
    sorted({schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""})
)


def edit_node(graph, data):
    node = data.draw(st.sampled_from(list(graph.node)))
    names = [name for n in graph.node for name in (*n.input, *n.output)]
    names += [t.name for t in graph.initializer] + [v.name for v in graph.input] + ["", "nowhere"]
    match data.draw(st.integers(0, 8)):
        case 0:
            graph.node.remove(node)
        case 1:
            graph.node.append(node)
        case 2:
            node.op_type = data.draw(OPERATORS)
        case 3 if node.input:
            node.input[data.draw(st.integers(0, len(node.input) - 1))] = data.draw(
                st.sampled_from(names)
            )
        case 4:
            node.input.append(data.draw(st.sampled_from(names)))
        case 5 if node.output:
            node.output[data.draw(st.integers(0, len(node.output) - 1))] = data.draw(
                st.sampled_from(names)
            )
        case 6 if node.input:
            del node.input[-1]
        case 7:
            del node.output[:]
        case _:
            node.domain = data.draw(st.sampled_from(["", "ai.onnx", "ai.onnx.ml", "else", "\0"]))


def edit_attribute(graph, data):
    nodes = [node for node in graph.node if node.attribute]
    if not nodes:
        return
    node = data.draw(st.sampled_from(nodes))
    attribute = data.draw(st.sampled_from(list(node.attribute)))
    match data.draw(st.integers(0, 5)):
        case 0:
            node.attribute.remove(attribute)
        case 1:
            attribute.i = data.draw(NUMBERS)
        case 2:
            del attribute.ints[:]
            attribute.ints.extend(data.draw(st.lists(NUMBERS, max_size=6)))
        case 3:
            attribute.type = data.draw(st.sampled_from(AttributeProto.AttributeType.values()))
        case 4:
            attribute.name = data.draw(st.sampled_from(["axis", "axes", "perm", "to", "value", ""]))
        case _:
            attribute.s = data.draw(st.binary(max_size=5))


def edit_tensor(graph, data):
    if not graph.initializer:
        return
    tensor = data.draw(st.sampled_from(list(graph.initializer)))
    match data.draw(st.integers(0, 5)):
        case 0:
            del tensor.dims[:]
            tensor.dims.extend(data.draw(st.lists(NUMBERS, max_size=5)))
        case 1:
            tensor.raw_data = data.draw(st.binary(max_size=64))
        case 2:
            tensor.data_type = data.draw(st.integers(-1, 30))
        case 3:
            value = data.draw(st.lists(NUMBERS, min_size=1, max_size=5))
            tensor.CopyFrom(helper.make_tensor(tensor.name, TensorProto.INT64, [len(value)], value))
        case 4:
            tensor.data_location = TensorProto.EXTERNAL
            location = data.draw(st.sampled_from(["", "x", "../x", "/etc/passwd", "\0", "a\\b"]))
            tensor.external_data.add(key="location", value=location)
        case _:
            graph.initializer.remove(tensor)


def edit_interface(graph, data):
    value = data.draw(st.sampled_from([*graph.input, *graph.output]))
    kind = value.type.tensor_type
    match data.draw(st.integers(0, 4)):
        case 0 if kind.shape.dim:
            axis = data.draw(st.sampled_from(list(kind.shape.dim)))
            axis.dim_value = data.draw(NUMBERS)
        case 1:
            kind.elem_type = data.draw(st.integers(-1, 30))
        case 2:
            kind.shape.dim.add(dim_value=data.draw(NUMBERS))
        case 3:
            value.ClearField("type")
        case _:
            value.name = data.draw(st.sampled_from(["", "x", *(n.name for n in graph.node)]))


def ask_for_a_giant(graph, data):
    """A node that would make an enormous tensor, in front of one that uses it."""
    node = data.draw(st.sampled_from(list(graph.node)))
    if not node.input:
        return
    sizes = data.draw(st.lists(NUMBERS, min_size=1, max_size=5))
    graph.initializer.append(helper.make_tensor("giant", TensorProto.INT64, [len(sizes)], sizes))
    slot = data.draw(st.integers(0, len(node.input) - 1))
    operator = data.draw(st.sampled_from(["ConstantOfShape", "Expand", "Tile", "Range", "Pad",
                                          "Resize", "Reshape", "OneHot"]))  # fmt: skip
    source = node.input[slot]
    inputs = {
        "ConstantOfShape": ["giant"], "Range": ["giant"] * 3, "OneHot": [source, "giant", "giant"],
        "Resize": [source, "", "", "giant"],
    }.get(operator, [source, "giant"])  # fmt: skip
    graph.node.insert(0, helper.make_node(operator, inputs, ["enormous"]))
    node.input[slot] = "enormous"


def fan_in(graph, data):
    """One node that takes the same tensor again and again."""
    node = data.draw(st.sampled_from(list(graph.node)))
    if node.input:
        times = data.draw(st.sampled_from([2, 1000, 90_000, 300_000]))
        node.op_type = data.draw(st.sampled_from([node.op_type, "Sum", "Concat", "Max", "Einsum"]))
        node.input.extend([node.input[0]] * times)


EDITS = [edit_node, edit_attribute, edit_tensor, edit_interface, ask_for_a_giant, fan_in]


def damaged(data) -> bytes:
    content = bytearray(data.draw(st.sampled_from(MODELS)))
    if data.draw(st.booleans()):
        model = onnx.ModelProto.FromString(bytes(content))
        for edit in data.draw(st.lists(st.sampled_from(EDITS), min_size=1, max_size=3)):
            if model.graph.node:
                edit(model.graph, data)
        if data.draw(st.integers(0, 9)) == 0:
            model.opset_import[0].version = data.draw(NUMBERS)
        content = bytearray(model.SerializeToString())
    else:
        for _ in range(data.draw(st.integers(1, 5))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        if data.draw(st.booleans()):
            del content[data.draw(st.integers(0, len(content))) :]
    return bytes(content)


@seed(SEED)
@settings(max_examples=EXAMPLES, deadline=None, database=None, print_blob=False,
          suppress_health_check=list(HealthCheck))  # fmt: skip
@given(data=st.data())
def fuzz(data):
    CASE.write_bytes(damaged(data))
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
    try:
        assert file_profile(CASE).graph.operators
    except (ModelFileError, UnsupportedModelError):
        pass
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main():
    def give_up(*_):
        raise AssertionError(f"more than {CPU_LIMIT_S} s")

    signal.signal(signal.SIGPROF, give_up)
    for path in sys.argv[4:]:
        file_profile(Path(path))  # what tracing imports is not of the files
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    fuzz()


if __name__ == "__main__":
    main()
