"""Reads ONNX files that anyone may have made: as graphs, and as modules that can be trained."""
