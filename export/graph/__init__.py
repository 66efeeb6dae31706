"""The ONNX graph of a decoder, built from operators."""
