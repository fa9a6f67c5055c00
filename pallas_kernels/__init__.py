"""Array kernels for paged attention. Depends on jax and numpy only, so that a researcher can use the package alone.

One folder an operation: ``__init__`` holds the public function, which is the contract, ``reference`` defines it in
plain float32 jax.numpy, and every other file is an implementation of the same function.
"""

from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.kv_cache_update import copy_blocks, gather_blocks, scatter_blocks, write_kv
from pallas_kernels.matmul import BlockWeight, block_weight, matmul
from pallas_kernels.quantized_matmul import QuantizedWeight, quantized_matmul
from pallas_kernels.ragged_paged_attention import AttentionMetadata, ragged_paged_attention

__all__ = [
    "AttentionMetadata",
    "BlockWeight",
    "QuantizedWeight",
    "block_weight",
    "copy_blocks",
    "gather_blocks",
    "grouped_matmul",
    "matmul",
    "quantized_matmul",
    "ragged_paged_attention",
    "scatter_blocks",
    "write_kv",
]
