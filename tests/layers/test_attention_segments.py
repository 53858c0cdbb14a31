import tensorflow as tf

from fastaccum.layers import attention_segments
from fastaccum.layers.attention_masks import Mask


def test_the_graph_of_documents_holds_no_matrix_of_tokens():
    """Holds no matrix of tokens as a constant, which would take seconds to trace."""

    @tf.function(autograph=False)
    def segments(ids):
        return attention_segments.as_segments(Mask(after=0, documents=(ids, ids)), 2, 4096, 4096)

    graph = segments.get_concrete_function(tf.TensorSpec([2, 4096], tf.int32)).graph
    assert graph.as_graph_def().ByteSize() < 2**16
