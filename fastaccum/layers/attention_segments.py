"""Attention masks as the segment ids of queries and keys that the kernels take."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from fastaccum.layers.attention_masks import Mask


def as_segments(
    mask: Mask, rows: tf.Tensor, queries: int, keys: int
) -> tuple[tuple[tf.Tensor, tf.Tensor], tf.Tensor]:
    """Returns documents and padding as ids of queries and keys, and whether a query sees any key.

    The last is bool [B, T]. Padding takes ids of its own beside those of documents, which must have
    32 bits then.
    """
    if mask.documents is None:
        query_ids = tf.zeros([1, queries], tf.int32)
        key_ids = tf.zeros([1, keys], tf.int32)
    else:
        query_ids, key_ids = mask.documents

    # Padding takes the ids 1 and 2, so those of documents become multiples of 4.
    is_padded = mask.queries is not None or mask.keys is not None
    if is_padded and mask.documents is not None:
        query_ids = 4 * tf.cast(query_ids, tf.int64)
        key_ids = 4 * tf.cast(key_ids, tf.int64)
    query_ids = tf.broadcast_to(query_ids, [rows, queries])
    key_ids = tf.broadcast_to(key_ids, [rows, keys])
    if mask.queries is not None:
        query_ids = tf.where(mask.queries, query_ids, 1)
    if mask.keys is not None:
        key_ids = tf.where(mask.keys, key_ids, 2)
    segments = query_ids, key_ids

    # Padding alone needs no places; they stand here because traced programs hold them either way.
    query_places = tf.range(queries)[:, None]
    key_places = tf.range(keys)
    if mask.documents is None:
        may_see = query_ids == 0
        is_seen = key_ids == 0
        return segments, _sees_any_in_band(mask, may_see, is_seen, queries, keys)

    if mask.after is None:
        is_early_enough = key_places >= 0
    else:
        is_early_enough = key_places <= query_places + mask.after
    is_late_enough: tf.Tensor | bool = True
    if mask.before is not None:
        is_late_enough = key_places >= query_places - mask.before
    is_in_band = is_early_enough & is_late_enough
    is_same_document = query_ids[:, :, None] == key_ids[:, None]
    return segments, tf.reduce_any(is_same_document & is_in_band, 2)


def _sees_any_in_band(
    mask: Mask, may_see: tf.Tensor, is_seen: tf.Tensor, queries: int, keys: int
) -> tf.Tensor:
    """Returns bool [B, T]: whether a query that may see has a key that is seen within the band.

    The band is from `mask.before` to `mask.after`. Sums over the first keys count those within it,
    without a matrix of queries and keys.
    """
    places = np.arange(queries)
    starts = np.zeros_like(places)
    if mask.before is not None:
        starts = np.maximum(places - mask.before, 0)
    ends = np.full_like(places, keys)
    if mask.after is not None:
        ends = np.minimum(places + mask.after + 1, keys)

    seen_before = tf.cumsum(tf.pad(tf.cast(is_seen, tf.int32), [[0, 0], [1, 0]]), 1)
    seen_before_end = tf.gather(seen_before, ends, axis=1)
    seen_before_start = tf.gather(seen_before, starts, axis=1)
    return may_see & (seen_before_end > seen_before_start)
