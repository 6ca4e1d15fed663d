"""What is shown of the samples that a report names, read from the datasets: as they are before any transfer hook."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_gradsim.queries import Query
from lightning_gradsim.report import Report
from lightning_gradsim.train_pass import SampleReader
from lightning_gradsim.views import QUERIES_PER_PAGE, Exhibit, ExhibitMaker, are_near_duplicates

SHOWN_TILES = 4
SHOWN_SUSPECTS = 24


@dataclass(frozen=True, eq=False)
class ShownSamples:
    """Exhibits of the samples that views show, and nothing else of them.

    Attributes:
        queries: One for each query of the report; ``None`` beyond those that are shown.
        train: By sample id.
    """

    queries: tuple[Exhibit | None, ...]
    train: Mapping[int, Exhibit]

    @property
    def have_pictures(self) -> bool:
        """Whether any of them is a picture."""
        return any(exhibit.picture is not None for exhibit in self._all)

    @property
    def have_words(self) -> bool:
        """Whether any of them is a text, or named values."""
        return self.have_texts or any(exhibit.values is not None for exhibit in self._all)

    @property
    def have_texts(self) -> bool:
        """Whether any of them is a text."""
        return any(exhibit.text is not None for exhibit in self._all)

    @property
    def failure(self) -> str | None:
        """Why ``describe=`` gave no text for some of them; ``None`` where it never failed."""
        return next((exhibit.failure for exhibit in self._all if exhibit.failure is not None), None)

    @property
    def note(self) -> str | None:
        """What the user can pass to see more of them."""
        return next((exhibit.note for exhibit in self._all if exhibit.note is not None), None)

    def near_duplicates(self, report: Report) -> tuple[tuple[int, int], ...]:
        """Shown training samples that are all but equal to a query.

        Args:
            report: The report.

        Returns:
            Pairs of the query's place in the report and the id of the training sample.
        """
        return tuple(
            (place, sample_id)
            for place, (query, exhibit) in enumerate(zip(report.queries, self.queries, strict=True))
            if exhibit is not None
            for sample_id in sorted({s.sample_id for s in (*query.harmful, *query.teachers, *query.look_alikes)})
            if sample_id in self.train and are_near_duplicates(exhibit, self.train[sample_id])
        )

    @property
    def _all(self) -> list[Exhibit]:
        return [*(exhibit for exhibit in self.queries if exhibit is not None), *self.train.values()]


def collect_shown_samples(
    report: Report,
    kept: Sequence[Query],
    train_reader: SampleReader,
    validation_readers: Mapping[int, SampleReader],
    maker: ExhibitMaker,
    *,
    num_queries: int = QUERIES_PER_PAGE,
) -> ShownSamples:
    """Read and prepare what views show.

    Args:
        report: The report.
        kept: The copy of each of the report's queries, for those whose place in the validation dataset is not known.
        train_reader: Reads the training samples.
        validation_readers: Readers of the validation datasets by loader, where the order is known.
        maker: Makes exhibits.
        num_queries: How many queries are shown.

    Returns:
        Exhibits of the first queries, of the first samples in each of their lists, and of the first suspects.
    """
    shown = report.queries[:num_queries]
    lists = [samples[:SHOWN_TILES] for query in shown for samples in (query.harmful, query.look_alikes, query.teachers)]
    train_ids = {sample.sample_id for samples in lists for sample in samples}
    # Training may have visited samples that `train_data=` does not hold.
    suspects = [suspect.sample_id for suspect in report.suspects[:SHOWN_SUSPECTS]]
    train_ids.update(train_reader.known(suspects))
    by_loader = {
        index: _read(
            reader, [q.sample_id for q in shown if q.dataloader_idx == index and q.sample_id is not None], maker
        )
        for index, reader in validation_readers.items()
    }
    queries: list[Exhibit | None] = []
    for query, copy in zip(shown, kept, strict=False):
        if query.sample_id is not None and query.dataloader_idx in by_loader:
            queries.append(by_loader[query.dataloader_idx].get(query.sample_id))
        else:
            queries.append(maker.make(copy.data, copy.data))
    queries += [None] * (len(report.queries) - len(shown))
    return ShownSamples(tuple(queries), _read(train_reader, sorted(train_ids), maker))


def _read(reader: SampleReader, sample_ids: Sequence[int], maker: ExhibitMaker) -> dict[int, Exhibit]:
    if not sample_ids:
        return {}
    # In the worker: what the user's `describe` does stays there, and no more than an exhibit is sent.
    show = _Show(maker, reader.options["collate_fn"])
    reader = replace(reader.lookup(sample_ids), options={**reader.options, "collate_fn": show})
    return {int(ids[0]): exhibit for ids, exhibit in reader.batches()}


@dataclass(frozen=True, eq=False)
class _Show:
    """Stands in for ``collate_fn``: from one sample to its exhibit."""

    maker: ExhibitMaker
    collate: Callable[[list[Any]], Any]

    def __call__(self, samples: list[Any]) -> Exhibit:
        return self.maker.make(samples[0], self.collate(samples))
