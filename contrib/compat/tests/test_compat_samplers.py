"""BatchSamplerShard and IterableDatasetShard give each process what Accelerate's give."""

from __future__ import annotations

import pytest
from peers import needs_accelerate, said

CASES = """
import itertools, json
from torch.utils.data import BatchSampler, SequentialSampler
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard

class Growing:
    batch_size, drop_last = None, False
    def __iter__(self):
        return iter([[0], [1, 2], [3, 4, 5], [6]])
    def __len__(self):
        return 4

def sharded(samples, size, drop, count, split, even):
    made = []
    for index in range(count):
        shard = BatchSamplerShard(BatchSampler(range(samples), size, drop), count, index, split, even)
        made.append([len(shard), [list(batch) for batch in shard]])
    return made

shown = []
flags = list(itertools.product([False, True], repeat=3))
for samples, size, count in itertools.product([0, 1, 2, 3, 7, 8, 12, 21, 24], [1, 2, 4, 6], [1, 2, 3]):
    for drop, split, even in flags:
        if not split or size % count == 0:
            case = (samples, size, drop, count, split, even)
            shown.append([*case, sharded(*case)])
        if samples and (not split or size % count == 0):
            case = (range(samples), size, drop, count)
            parts = [list(IterableDatasetShard(*case, index, split)) for index in range(count)]
            shown.append([samples, size, drop, count, split, parts])
for count, even in itertools.product((2, 3), (True, False)):
    shards = [BatchSamplerShard(Growing(), count, index, even_batches=even) for index in range(count)]
    shown.append([[list(batch) for batch in shard] for shard in shards])
print(json.dumps(shown))
"""


@needs_accelerate
def test_each_process_gets_the_same_samples(run_processes):
    for theirs, ours in zip(
        said(run_processes, CASES, ours=False), said(run_processes, CASES, ours=True), strict=True
    ):
        assert ours == theirs


def test_a_batch_that_cannot_be_split_is_refused():
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler

    with pytest.raises(ValueError, match="round multiple of the number of processes"):
        BatchSamplerShard(BatchSampler(range(9), 3, False), 2, 0, split_batches=True)


def test_a_loader_made_by_hand_knows_its_last_batch():
    from accelerate.data_loader import DataLoaderShard

    loader = DataLoaderShard(list(range(16)), batch_size=4)

    assert [loader.end_of_dataloader for _ in loader] == [False, False, False, True]


@pytest.mark.parametrize("skipped", [0, 2, 4])
def test_first_batches_are_skipped_of_any_loader(skipped):
    from accelerate import skip_first_batches
    from torch.utils.data import DataLoader

    loader = skip_first_batches(DataLoader(list(range(16)), batch_size=4), skipped)

    assert [batch.tolist() for batch in loader] == [
        list(range(at, at + 4)) for at in range(4 * skipped, 16, 4)
    ]
