"""Files made by hand to do harm: each is refused or answered in one line, and gives nothing away.

Some name a folder of secrets, whose file `secret` holds SECRET; next to the model are links to it.
"""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import onnx
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, helper

SECRET = b"postgresql://trappm:hunter2@db/labels\n" * 64
_SHAPE = ["n", 3, 8, 8]
_IMAGE = helper.make_tensor_value_info("x", TensorProto.FLOAT, _SHAPE)
_RESULT = helper.make_tensor_value_info("y", TensorProto.FLOAT, _SHAPE)
_RELU = helper.make_node("Relu", ["x"], ["y"])
_OPSETS = [helper.make_opsetid("", 17)]
node = helper.make_node


def model(*nodes, initializers=(), functions=(), domains=(), inputs=(), **rest) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "g", [_IMAGE, *inputs], [_RESULT], list(initializers), **rest)
    opsets = [*_OPSETS, *(helper.make_opsetid(domain, 1) for domain in domains)]
    return helper.make_model(graph, opset_imports=opsets, functions=list(functions), ir_version=10)


def hostile_files(secrets: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of some five hundred files."""
    above, absolute = f"../{secrets.name}/secret", str(secrets / "secret")
    for location in (absolute, above, "linked/secret", "link", "secret", "", "x.onnx"):
        shown = location.replace(str(secrets), "S")
        for name, content in tensors_at(location):
            yield f"{name} at {shown!r}", content
    for kind in (_types(), _domains(), _giants(), _functions(), _chains()):
        for name, content in kind:
            yield name, content.SerializeToString()
    yield from _text()
    yield from amplified()
    whole = model(_RELU).SerializeToString()
    for length in range(0, len(whole), 4):
        yield f"cut at {length}", whole[:length]


def outside(location: str, kind: int = TensorProto.INT64, dims=(4,)) -> TensorProto:
    tensor = TensorProto(name="w", data_type=kind, dims=dims, data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    return tensor


def tensors_at(location: str) -> Iterator[tuple[str, bytes]]:
    """Files with a tensor that lies outside them, in every place where one can stand."""
    for name, made in _places(location):
        yield name, made.SerializeToString()


def _places(location: str) -> Iterator[tuple[str, onnx.ModelProto]]:
    reshape = node("Reshape", ["x", "w"], ["y"])
    tensor = outside(location)
    yield "an initializer", model(reshape, initializers=[tensor])
    weight = outside(location, TensorProto.FLOAT, (3, 3, 1, 1))
    yield "a weight", model(node("Conv", ["x", "w"], ["y"]), initializers=[weight])
    shape = helper.make_tensor("s", TensorProto.INT64, [1], [4])
    for operator, domain in itertools.product(("ConstantOfShape", "Constant", "Else"), ("", "d")):
        maker = node(operator, ["s"] if operator != "Constant" else [], ["w"], domain=domain)
        maker.attribute.add(name="value", type=AttributeProto.TENSOR).t.CopyFrom(tensor)
        made = model(maker, reshape, initializers=[shape], domains=[domain] if domain else [])
        yield f"{domain}.{operator}", made
        maker.attribute[0].type = AttributeProto.FLOAT
        made = model(maker, reshape, initializers=[shape], domains=[domain] if domain else [])
        yield f"{domain}.{operator} that says it is a number", made
    twice = node("Constant", [], ["w"])
    for _ in range(2):
        twice.attribute.add(name="value", type=AttributeProto.TENSOR).t.CopyFrom(tensor)
    yield "a constant of two values", model(twice, reshape)
    beside = node("Constant", [], ["w"], value_ints=[0, 3, 8, 8])
    beside.attribute.add(name="other", type=AttributeProto.TENSORS).tensors.append(tensor)
    yield "an attribute of a constant", model(beside, reshape)
    sparse = onnx.SparseTensorProto(values=tensor, indices=tensor, dims=[4])
    made = model(_RELU)
    made.graph.sparse_initializer.append(sparse)
    yield "a sparse weight", made
    holder = node("Relu", ["x"], ["y"])
    holder.attribute.add(name="a", type=AttributeProto.SPARSE_TENSOR).sparse_tensor.CopyFrom(sparse)
    yield "a sparse attribute", model(holder)
    lone = node("Constant", [], ["w"])
    lone.attribute.add(name="sparse_value", type=11).sparse_tensor.CopyFrom(sparse)
    yield "a sparse constant", model(lone, reshape)
    inner = GraphProto(name="i", initializer=[tensor], output=[_RESULT])
    for kind in (AttributeProto.GRAPH, AttributeProto.UNDEFINED):
        holder = node("If", ["x"], ["y"])
        holder.attribute.add(name="then_branch", type=kind).g.CopyFrom(inner)
        yield f"a subgraph of type {kind}", model(holder)
        function = helper.make_function("f", "F", ["a"], ["b"], [holder], _OPSETS)
        call = node("F", ["x"], ["y"], domain="f")
        yield f"a function's subgraph {kind}", model(call, functions=[function], domains=["f"])
    constant = node("Constant", [], ["w"])
    constant.attribute.add(name="value", type=AttributeProto.TENSOR).t.CopyFrom(tensor)
    body = [constant, node("Reshape", ["a", "w"], ["b"])]
    function = helper.make_function("f", "F", ["a"], ["b"], body, _OPSETS)
    yield "a function", model(node("F", ["x"], ["y"], domain="f"), functions=[function],
                              domains=["f"])  # fmt: skip
    yield "a function that nobody calls", model(_RELU, functions=[function], domains=["f"])
    function = helper.make_function("f", "F", ["a"], ["b"], body, _OPSETS)
    function.node[0].attribute[0].Clear()
    function.node[0].attribute[0].name = "value"
    function.node[0].attribute[0].ref_attr_name = "v"
    function.node[0].attribute[0].type = AttributeProto.TENSOR
    default = AttributeProto(name="v", type=AttributeProto.TENSOR, t=tensor)
    function.attribute_proto.append(default)
    yield "a function's default", model(node("F", ["x"], ["y"], domain="f"), functions=[function],
                                        domains=["f"])  # fmt: skip
    made = model(_RELU)
    made.training_info.add().initialization.initializer.append(tensor)
    yield "what is for training", made


def _types() -> Iterator[tuple[str, onnx.ModelProto]]:
    """Element types that there are not, or that nobody expects there."""
    for kind in (-1, 0, 8, 16, 23, 99, 2**31 - 1):
        image = helper.make_tensor_value_info("x", kind, _SHAPE)
        made = model(_RELU)
        made.graph.input[0].CopyFrom(image)
        yield f"an image of type {kind}", made
        for dims in ([3], [3, 3, 1, 1], [100]):
            weight = TensorProto(name="w", data_type=kind, dims=dims, raw_data=b"\0" * 400)
            operator = "Conv" if len(dims) > 1 else "Mul"
            yield (f"a weight of type {kind} and rank {len(dims)}, {dims[0]}",
                   model(node(operator, ["x", "w"], ["y"]), initializers=[weight]))  # fmt: skip
            supplied = helper.make_tensor_value_info("w", kind, dims)
            yield (f"a weight to be supplied, of type {kind}, {dims}",
                   model(node(operator, ["x", "w"], ["y"]), inputs=[supplied]))  # fmt: skip
        cast = node("Cast", ["x"], ["c"], to=kind)
        yield f"a cast to type {kind}", model(cast, node("Relu", ["c"], ["y"]))
        shape = helper.make_tensor("s", TensorProto.INT64, [1], [8])
        filled = node("ConstantOfShape", ["s"], ["c"])
        value = TensorProto(data_type=kind, dims=[1], raw_data=b"\0" * 8)
        filled.attribute.add(name="value", type=AttributeProto.TENSOR).t.CopyFrom(value)
        yield (f"a filler of type {kind}",
               model(filled, node("Mul", ["x", "c"], ["y"]), initializers=[shape]))  # fmt: skip
        for operator in ("EyeLike", "RandomNormalLike"):
            like = node(operator, ["x"], ["c"], dtype=kind)
            yield f"{operator} of type {kind}", model(like, node("Add", ["x", "c"], ["y"]))


_WORDS = (
    rb"Mul|Elu|weight|inner|named|words|other|first|last|alpha|given|attribute|location|value|facts"
)


def _text() -> Iterator[tuple[str, bytes]]:
    """Text that is not UTF-8, in place of each word in a model of everything."""
    made = model(node("Mul", ["x", "weight"], ["inner"], name="named", doc_string="words"),
                 node("F", ["inner"], ["y"], domain="other"), domains=["other"],
                 initializers=[helper.make_tensor("weight", TensorProto.FLOAT, [1], [0])],
                 functions=[helper.make_function("other", "F", ["first"], ["last"],
                                                 [node("Elu", ["first"], ["last"], alpha=1.0)],
                                                 _OPSETS, ["given"])])  # fmt: skip
    made.graph.node[0].attribute.add(name="attribute", type=AttributeProto.STRING, s=b"text")
    made.graph.initializer[0].external_data.add(key="location", value="value")
    made.graph.quantization_annotation.add(tensor_name="weight")
    for holder in (made, made.graph, made.graph.node[0], made.graph.input[0], made.functions[0]):
        holder.metadata_props.add(key="facts", value="value")
    made.graph.value_info.add(name="inner", doc_string="words")
    content = made.SerializeToString()
    for word in re.finditer(_WORDS, content):
        damaged = b"\xff\xfe\xff\xfe".ljust(len(word[0]))
        yield (f"no UTF-8 at {word[0].decode()}, {word.start()}",
               content[: word.start()] + damaged + content[word.end() :])  # fmt: skip


def _domains() -> Iterator[tuple[str, onnx.ModelProto]]:
    """ONNX's operators under another's name."""
    for operator in ("Shape", "Size", "Constant", "Identity", "Cast", "ConstantOfShape", "Reshape"):
        for domain in ("d", "ai.onnx", "ai.onnx.ml", "ai.onnx.training", "com.microsoft"):
            odd = node(operator, ["x"], ["s"], domain=domain)
            for after in (node("Reshape", ["x", "s"], ["y"]), node("Relu", ["s"], ["y"])):
                made = model(odd, after, domains=[domain])
                yield f"{domain}.{operator} before {after.op_type}", made


def _giants() -> Iterator[tuple[str, onnx.ModelProto]]:
    numbers = ([2**62] * 5, [-(2**63)] * 4, [2**40, 2**40], [1] * 1000, [0] * 4, [2**31] * 3)
    makers = ("ConstantOfShape", "Expand", "Tile", "Range", "Pad", "Resize", "Reshape", "OneHot")
    for sizes, operator in itertools.product(numbers, makers):
        giant = helper.make_tensor("s", TensorProto.INT64, [len(sizes)], sizes)
        inputs = {"ConstantOfShape": ["s"], "Range": ["s"] * 3, "OneHot": ["x", "s", "s"],
                  "Resize": ["x", "", "", "s"]}.get(operator, ["x", "s"])  # fmt: skip
        made = model(node(operator, inputs, ["t"]), node("Add", ["x", "t"], ["y"]),
                     initializers=[giant])  # fmt: skip
        yield f"{operator} of {len(sizes)} times {sizes[0]}", made
    weight = TensorProto(name="w", data_type=1, dims=[2**62] * 200_000)
    yield "two hundred thousand axes", model(node("Mul", ["x", "w"], ["y"]), initializers=[weight])
    made = model(_RELU)
    made.graph.input[0].type.tensor_type.shape.dim.extend(
        [onnx.TensorShapeProto.Dimension(dim_value=2**62)] * 200_000
    )
    yield "an image of two hundred thousand axes", made
    for name, value in (("perm", [0] * 500_000), ("axes", list(range(500_000)))):
        odd = node("Transpose" if name == "perm" else "ReduceMean", ["x"], ["y"], **{name: value})
        yield f"half a million {name}", model(odd)
    yield "an einsum of a megabyte", model(node("Einsum", ["x"], ["y"], equation="a" * 1_000_000))


def _functions() -> Iterator[tuple[str, onnx.ModelProto]]:
    """Functions that grow when they are put in place of their calls."""
    call = node("F9", ["x"], ["y"], domain="f")
    for alias, overload in itertools.product(("f", "", "ai.onnx"), ("", "o")):
        functions = []
        for level in range(10):
            below = f"F{level - 1}" if level else "Relu"
            body = [node(below, [f"a{i}"], [f"a{i + 1}"], domain=alias if level else "",
                         overload=overload) for i in range(10)]  # fmt: skip
            made = helper.make_function(alias or "ai.onnx", f"F{level}", ["a0"], ["a10"], body,
                                        [*_OPSETS, helper.make_opsetid("f", 1)],
                                        overload=overload)  # fmt: skip
            functions.append(made)
        first = node("F9", ["x"], ["y"], domain=alias, overload=overload)
        yield (f"ten to the tenth of {alias!r} {overload!r}",
               model(first, functions=functions, domains=["f"]))  # fmt: skip
    loop = helper.make_function("f", "F9", ["a"], ["b"], [node("F9", ["a"], ["b"], domain="f")],
                                [*_OPSETS, helper.make_opsetid("f", 1)])  # fmt: skip
    yield "a function that calls itself", model(call, functions=[loop], domains=["f"])
    for size in (1000, 1_000_000):
        for name, attribute in (
            ("numbers", helper.make_attribute("v", list(range(size)))),
            ("text", helper.make_attribute("v", "t" * size)),
            ("a tensor", helper.make_attribute("v", TensorProto(
                data_type=1, dims=[size], raw_data=b"\0" * 4 * size))),
        ):  # fmt: skip
            body = [NodeProto(op_type="Elu", input=["a"], output=[f"b{i}"]) for i in range(5000)]
            for operator in body:
                operator.attribute.add(name="v", ref_attr_name="v", type=attribute.type)
            holders = ("call", "default")
            for holder in holders:
                function = helper.make_function("f", "F9", ["a"], ["b1"], body, _OPSETS)
                caller = node("F9", ["x"], ["y"], domain="f")
                if holder == "call":
                    function.attribute.append("v")
                    caller.attribute.append(attribute)
                else:
                    function.attribute_proto.append(attribute)
                yield (f"{name} of {size} handed on 5000 times by {holder}",
                       model(caller, functions=[function], domains=["f"]))  # fmt: skip
    long = "n" * 999
    body = [node("Sum", ["a"] * 9, [f"b{i}"], name="m" * 900) for i in range(15_000)]
    function = helper.make_function("f", "F9", ["a"], ["b1"], body, _OPSETS)
    yield "a long name at each place", model(node("Relu", ["x"], [long]),
        node("F9", [long], ["y"], domain="f"), functions=[function], domains=["f"])  # fmt: skip
    functions = [helper.make_function(
        "f", f"F{i}", ["a"], ["b"],
        [node(f"F{i - 1}" if i else "Relu", ["a"], ["b"], domain="f" if i else "")],
        [*_OPSETS, helper.make_opsetid("f", 1)]) for i in range(60)]  # fmt: skip
    calls = [node("F59", ["x"], [f"t{i}" if i else "y"], domain="f") for i in range(15_000)]
    yield "sixty deep, fifteen thousand times", model(*calls, functions=functions, domains=["f"])


def _chains() -> Iterator[tuple[str, onnx.ModelProto]]:
    weight = helper.make_tensor("w", TensorProto.FLOAT, [3, 3, 1, 1], [0] * 9)
    for operator, length in itertools.product(("Relu", "Conv", "Identity", "Add"), (5_900, 20_000)):
        names = ["x", *(f"t{i}" for i in range(length - 1)), "y"]
        more = {"Conv": ["w"], "Add": ["x"]}.get(operator, [])
        chain = [node(operator, [a, *more], [b]) for a, b in itertools.pairwise(names)]
        chain[-1] = node("Relu", [chain[-1].input[0]], ["y"])
        yield f"{length} of {operator}", model(*chain, initializers=[weight])
    names = [f"t{i}" for i in range(19_990)]
    sums = [node("Add", [a, a], [b]) for a, b in itertools.pairwise(names)]
    shapes = [node("Shape", ["x"], ["t0"]), *sums, node("Reshape", ["x", names[-1]], ["y"])]
    yield "twenty thousand sums of a shape", model(*shapes)
    wide = node("Concat", ["x"] * 190_000, ["y"], axis=1)
    yield "a concatenation of 190,000", model(wide)
    outputs = [f"t{i}" for i in range(190_000)]
    yield "a split into 190,000", model(node("Split", ["x"], [*outputs, "y"], axis=1))


def _varint(number: int) -> bytes:
    data = b""
    while number > 127:
        data += bytes([number & 127 | 128])
        number >>= 7
    return data + bytes([number])


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def amplified(times: int = 10_000_000) -> Iterator[tuple[str, bytes]]:
    """Few bytes that protobuf unpacks to many: records of nothing."""
    plain = model(_RELU)
    graph = plain.graph.SerializeToString()
    plain.ClearField("graph")
    head = plain.SerializeToString()
    for name, number in (("nodes", 1), ("initializers", 5), ("inputs", 11), ("value infos", 13),
                         ("annotations", 14), ("sparse tensors", 15),
                         ("metadata", 16)):  # fmt: skip
        yield f"empty {name}", head + _field(7, graph + _field(number, b"") * times)
    for name, inner in (
        ("attributes", _field(1, _field(5, b"") * times)),
        ("a node's inputs", _field(1, _field(1, b"") * times)),
        ("strings", _field(5, _field(6, b"") * times)),
        ("axes", _field(13, _field(2, _field(1, _field(2, _field(1, b"") * times))))),
        ("packed numbers", _field(5, _field(7, b"\0" * 2 * times))),
    ):
        yield f"empty {name} inside", head + _field(7, graph + inner)
    yield "empty functions", head + _field(7, graph) + _field(25, b"") * times
    yield "empty opsets", head + _field(7, graph) + _field(8, b"") * times
