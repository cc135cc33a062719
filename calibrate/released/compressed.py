"""PLACEHOLDER"""
from typing import Any
from moepack.pack.errors import InputError
def read(document: Any, quantization: Any) -> Any:
    raise InputError("not yet")
read_awq = read
