"""XLA building blocks of the train step."""

from fastaccum.kernels.attention import attention as attention
from fastaccum.kernels.attention import attention_implementation as attention_implementation
from fastaccum.kernels.checkpoint_name import checkpoint_name as checkpoint_name
from fastaccum.kernels.cross_entropy import linear_cross_entropy as linear_cross_entropy
from fastaccum.kernels.fp32_layers import fp32_weight_gradients as fp32_weight_gradients
from fastaccum.kernels.fp32_layers import plain_weight_gradients as plain_weight_gradients
from fastaccum.kernels.layer_stack import LayerStack as LayerStack
from fastaccum.kernels.matmul import einsum_float8 as einsum_float8
from fastaccum.kernels.matmul import matmul_float8 as matmul_float8
from fastaccum.kernels.matmul import matmul_fp32_wgrad as matmul_fp32_wgrad
