"""A tiny Qwen-VL that looks at two digits videos, reasons in a few sentences, and compares them."""
