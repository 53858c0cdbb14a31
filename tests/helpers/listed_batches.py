"""A PyDataset of batches that are there already."""

import keras
import numpy as np


class ListedBatches(keras.utils.PyDataset):
    """Batches as they are listed, in another order in each epoch if `shuffled`."""

    def __init__(self, batches, shuffled=False):
        super().__init__()
        self.batches = list(batches)
        self.random = np.random.default_rng(3) if shuffled else None
        self.order = np.arange(len(self.batches))

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, i):
        return self.batches[self.order[i]]

    def on_epoch_end(self):
        if self.random is not None:
            self.random.shuffle(self.order)
