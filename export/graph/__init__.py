"""The ONNX graph of a decoder, put together of operators."""
