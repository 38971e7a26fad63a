"""Loaders of other libraries, the real ones: Hugging Face's datasets, and Grain."""

import datasets
import grain
import numpy as np
import pytest

from fixstep.runtime import ArrayData, Checkpoints, DatasetData, Loop, TemplateError, load

RNG = np.random.default_rng(5)
X = RNG.standard_normal((36, 4)).astype(np.float32)
Y = RNG.standard_normal((36, 3)).astype(np.float32)
ROWS = [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]


def of_hugging_face():
    return datasets.Dataset.from_dict({"x": X, "y": Y}).with_format("numpy")


def grain_loader():
    return grain.DataLoader(
        data_source=ROWS,
        sampler=grain.samplers.IndexSampler(num_records=len(ROWS), shuffle=True, seed=3, num_epochs=1),
        operations=[grain.transforms.Batch(batch_size=8, drop_remainder=True)],
    )


def grain_map_dataset():
    return grain.MapDataset.source(ROWS).seed(1).shuffle().batch(8, drop_remainder=True)


def grain_iter_dataset():
    return grain_map_dataset().to_iter_dataset()


LOADERS = [grain_loader, grain_map_dataset, grain_iter_dataset]


def ended(artifact, data, *handlers, **options):
    session = load(artifact)
    Loop(session, handlers).run(data, **options)
    return session.steps, {path: array.tobytes() for path, array in session.state().items()}


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_data_set_of_hugging_face_is_shuffled_as_arrays_are(tiny_artifact, prefetch):
    expected = ended(tiny_artifact, ArrayData({"x": X, "y": Y}, 8, seed=7), epochs=2)
    data = DatasetData(of_hugging_face(), 8, seed=7)
    assert ended(tiny_artifact, data, epochs=2, prefetch=prefetch) == expected
    assert expected[0] == 8


def test_its_columns_are_checked_as_any_leaf(tiny_artifact):
    wrong = datasets.Dataset.from_dict({"x": X, "label": np.arange(36)}).with_format("numpy")
    with pytest.raises(
        TemplateError, match=r"y: expected float32\[8,3\], missing\n  label: unexpected, got int64\[8\]"
    ):
        ended(tiny_artifact, DatasetData(wrong, 8))


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_loader_of_grain_is_gone_through_once_an_epoch(loader, prefetch, tiny_artifact):
    session = load(tiny_artifact)
    for _ in range(2):
        for batch in loader():
            session.step(batch)
    expected = {path: array.tobytes() for path, array in session.state().items()}
    assert ended(tiny_artifact, loader(), epochs=2, prefetch=prefetch) == (8, expected)


@pytest.mark.parametrize("source", [*LOADERS, lambda: DatasetData(of_hugging_face(), 8)], ids=lambda f: f.__name__)
def test_a_run_over_a_loader_is_resumed_exactly(source, tiny_artifact, tmp_path):
    expected = ended(tiny_artifact, source(), epochs=3)
    ended(tiny_artifact, source(), Checkpoints(tmp_path), epochs=3, max_steps=6)  # in the middle of an epoch
    session = load(tiny_artifact)
    Loop(session, [Checkpoints(tmp_path)]).run(source(), epochs=3, resume=True)
    assert (session.steps, {path: array.tobytes() for path, array in session.state().items()}) == expected
