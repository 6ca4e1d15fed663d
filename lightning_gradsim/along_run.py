"""Similarities of some validation samples, summed over the reports of a run, for every training sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_gradsim.arguments import check_count_or_ids, check_positive
from lightning_gradsim.datasets import sample_ids
from lightning_gradsim.history import key_of
from lightning_gradsim.queries import QuerySelection
from lightning_gradsim.records import InfluentialSample, QueryAlongRun
from lightning_gradsim.report import Report
from lightning_gradsim.sample_statistics import labels_of
from lightning_gradsim.sums_file import UNREADABLE, hash_sums, make_room, read_sums, write_sums
from lightning_gradsim.topk import ScoreRows, TopK
from lightning_gradsim.train_pass import ids_in_order

MAX_NAMED = 10
NO_IDS = (
    "`along_run=` needs a validation loader that reads in the dataset's order: its samples have no id here, and "
    "nothing is summed. Pass one without `shuffle=True`"
)


@dataclass(frozen=True)
class Summed:
    """What became of a report's scores, for all processes.

    Attributes:
        records: The samples of this validation that are summed for, with their lists.
        keys: Keys of all samples that are summed for, in the order of their rows.
        since: Epoch of the first report of each.
        numbers: How many reports count for each.
        step: Global step of the newest report.
        notes: What limits the sums.
    """

    records: tuple[QueryAlongRun, ...]
    keys: tuple[int, ...]
    since: tuple[int, ...]
    numbers: tuple[int, ...]
    step: int
    notes: tuple[str, ...]


NOTHING = Summed((), (), (), (), -1, ())


class AlongRun:
    """Chooses validation samples and sums their similarities with all training samples over the reports of a run.

    Sums are float32, four bytes for each of the samples and each training sample, and one process holds them. They are
    part of the state. Where they take more memory than stated, they lie in a file that is mapped into memory, and the
    state names a file beside the checkpoint, and its hash.

    Life cycle: ``begin_run``; ``load_state_dict`` if the run is resumed; ``restore``; at each report ``choose``,
    ``add`` on the process that holds the sums, ``settle`` on all; ``save`` with each checkpoint.

    Args:
        wanted: How many samples, each from the first report on for which it is a query; or ids into the first
            validation dataset.
        max_state_mb: Beyond that many MiB, sums lie in files.
        name: Begins the names of files.

    Attributes:
        folder: Where files go.

    Raises:
        TypeError: If ``wanted`` has a wrong type.
        ValueError: If it is out of range.
    """

    def __init__(self, wanted: int | Sequence[int], max_state_mb: float, name: str) -> None:
        check_count_or_ids("along_run", wanted)
        check_positive("max_state_mb", max_state_mb)
        self.folder = Path()
        self._wanted = wanted if isinstance(wanted, int) else tuple(int(each) for each in wanted)
        self._max_bytes, self._name = int(max_state_mb * 2**20), name
        self.begin_run()

    def __getstate__(self) -> dict[str, Any]:
        """Copies hold sums in memory, wherever they lie here."""
        return {**vars(self), "_sums": None if self._sums is None else self._sums.clone()}

    def begin_run(self) -> None:
        """Forget earlier runs."""
        self._done = NOTHING
        self._basis: tuple[str, ...] = ()
        self._ids: Tensor | None = None
        self._sums: Tensor | None = None
        self._digest: str | None = None
        self._state: Mapping[str, Any] = {}
        self._restart: str | None = None
        self._is_checked = False

    @property
    def keys(self) -> frozenset[int]:
        """Keys of the validation samples that have to be kept, right or wrong."""
        given = () if isinstance(self._wanted, int) else (key_of(0, each) for each in self._wanted)
        return frozenset([*self._done.keys, *given])

    def check(self, loaders: Sequence[Any]) -> str | None:
        """Look at the validation data, once a run.

        Args:
            loaders: The validation loaders.

        Returns:
            What hinders, in words, if anything does.

        Raises:
            ValueError: If ids are given that the first of them does not have.
        """
        if self._is_checked or not loaders:
            return None
        self._is_checked = True
        if all(ids_in_order(each) is None for each in loaders):
            return NO_IDS
        if not isinstance(self._wanted, int):
            known = sample_ids(loaders[0].dataset)
            wanted = torch.tensor(self._wanted)
            unknown = wanted[~torch.isin(wanted, known)].tolist()
            if unknown:
                raise ValueError(
                    f"`along_run` names {_ids_in_words(unknown)}, which the first validation dataset does not have. "
                    f"Expected ids from {int(known.min())} to {int(known.max())}."
                )
        return None

    def make_rows(self, num_rows: int, num_samples: int) -> Tensor:
        """Room for scores, float32 ``[num_rows, num_samples]``, zero; beyond the stated memory in a file."""
        return make_room(num_rows, num_samples, self._max_bytes, self.folder)

    def choose(self, selection: QuerySelection) -> None:
        """Add queries to the samples that are summed for, while there are fewer than wanted.

        Args:
            selection: The queries, of all processes.
        """
        if isinstance(self._wanted, int):
            for query in selection.queries:
                if query.sample_id is not None and len({*self._done.keys, *selection.along_run}) < self._wanted:
                    selection.along_run.setdefault(key_of(query.dataloader_idx, query.sample_id), query)

    def add(self, report: Report, parts: Sequence[ScoreRows | None], top_k: int) -> Summed:
        """Add the scores of a report, once a step: the last validation of a run may be reported twice.

        Args:
            report: The report.
            parts: The scores that each process has, rows in the order of ``report.along_run``.
            top_k: Length of the lists.

        Returns:
            What ``settle`` takes.
        """
        scores = [part.compute() for part in parts if part is not None]
        if not scores:
            return replace(self._done, records=(), notes=self._notes(self._done.keys))
        ids = torch.cat([ids for _, ids in scores]).sort().values
        done, basis = self._done, (report.similarity, *report.layers)
        if self._ids is not None and not (torch.equal(self._ids, ids) and self._basis == basis):
            other = "layers or similarity" if self._basis != basis else "training samples"
            self._restart = f"influences along the run begin anew at epoch {report.epoch}: there are other {other} now"
            done, self._ids = NOTHING, None
        own = [key_of(each.dataloader_idx, each.sample_id) for each in report.along_run]
        is_new = report.step != done.step
        keys = (*done.keys, *(key for key in own if is_new and key not in done.keys))
        if self._ids is None or self._sums is None:
            self._ids, self._basis, self._sums = ids, basis, None
        sums = self._sums = self._with_room(len(keys), len(ids))
        since = [*done.since, *[report.epoch] * (len(keys) - len(done.keys))]
        numbers = [*done.numbers, *[0] * (len(keys) - len(done.keys))]
        places = {key: place for place, key in enumerate(keys)}
        if is_new:
            self._digest = None
            for values, part_ids in scores:
                columns = torch.searchsorted(ids, part_ids)
                for key, row in zip(own, values, strict=True):
                    sums[places[key], columns] -= row  # rows are of the harmful, whose sign is turned
            for key in own:
                numbers[places[key]] += 1
        records = tuple(
            self._with_lists(replace(each, since_epoch=since[place], num_reports=numbers[place]), place, report, top_k)
            for each, place in ((each, places.get(key)) for each, key in zip(report.along_run, own, strict=True))
            if place is not None
        )
        return Summed(records, keys, tuple(since), tuple(numbers), report.step, self._notes(keys))

    def settle(self, report: Report, summed: Summed) -> Report:
        """Take over what ``add`` gave on the process that holds the sums.

        Args:
            report: The report.
            summed: What it gave.

        Returns:
            The report with what it says along the run.
        """
        self._done = replace(summed, records=())
        return replace(report, along_run=summed.records, notes=(*report.notes, *summed.notes))

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors: which samples, and their sums or the file that holds them."""
        done = self._done
        if not done.keys:
            return {}
        state = {
            "keys": list(done.keys),
            "since": list(done.since),
            "numbers": list(done.numbers),
            "step": done.step,
            "basis": list(self._basis),
            "restart": self._restart,
        }
        if self._sums is None or self._ids is None:  # another process has them
            return state
        sums = self._sums[: len(done.keys)]
        if 4 * sums.numel() <= self._max_bytes:
            return {**state, "ids": self._ids, "sums": sums.clone()}
        if self._digest is None:
            self._digest = hash_sums(self._ids, sums)
        return {**state, "folder": str(self.folder), "hash": self._digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state at ``restore``.

        Args:
            state: The state.
        """
        self._state = state

    def restore(self, folder: Path | None) -> tuple[Summed, str | None]:
        """Find the sums that a state holds or names.

        Args:
            folder: Where the checkpoint lies, if that is known.

        Returns:
            What ``resume`` takes on all processes, and why the sums begin anew, where they do.
        """
        state, self._state = self._state, {}
        if not state:
            return self._done, None
        found: tuple[Tensor, Tensor] | None
        if "sums" in state:
            found, reason = (state["ids"], state["sums"]), ""
        else:
            found, reason = self._find(state, [*([] if folder is None else [folder]), Path(state["folder"])])
        if found is None:
            self.begin_run()
            self._restart = f"influences along the run begin anew after the resume: {reason}"
            return NOTHING, self._restart
        self._ids, loaded = found
        self._sums = None
        self._sums = self._with_room(*loaded.shape)
        self._sums[: len(loaded)] = loaded
        self._basis, self._restart = tuple(state["basis"]), state["restart"]
        done = [tuple(int(each) for each in state[name]) for name in ("keys", "since", "numbers")]
        return Summed((), done[0], done[1], done[2], int(state["step"]), ()), None

    def resume(self, done: Summed) -> None:
        """Go on with the samples that ``restore`` has found."""
        self._done = done

    def save(self) -> None:
        """Write the file that ``state_dict`` names, if it names one."""
        state = self.state_dict()
        if "hash" in state and self._sums is not None and self._ids is not None:
            path = self.folder / self._file(state)
            if not path.exists():
                write_sums(path, self._ids, self._sums[: len(self._done.keys)])

    def _file(self, state: Mapping[str, Any]) -> str:
        return f"{self._name}-along-run-step{state['step']}-{state['hash'][:16]}.pt"

    def _find(self, state: Mapping[str, Any], folders: Sequence[Path]) -> tuple[tuple[Tensor, Tensor] | None, str]:
        """Ids and sums of the file that a state names; ``None``, and why, where it is not there as it was."""
        name = self._file(state)
        path = next((folder / name for folder in folders if (folder / name).exists()), None)
        if path is None:
            where = " or ".join(f"`{folder}`" for folder in dict.fromkeys(folders))
            return None, f"`{name}` is not in {where}; copy it beside the checkpoint to go on with its sums"
        try:
            ids, sums = read_sums(path)
            if hash_sums(ids, sums) == state["hash"]:
                return (ids, sums), ""
        except UNREADABLE as error:
            return None, f"`{path}` cannot be read, with {type(error).__name__}"
        return None, f"`{path}` is not as it was written"

    def _with_room(self, num_rows: int, num_samples: int) -> Tensor:
        """The sums with rows for all samples wanted, so that they are moved once."""
        sums = self._sums
        if sums is not None and len(sums) >= num_rows:
            return sums
        number = self._wanted if isinstance(self._wanted, int) else len(self._wanted)
        larger = self.make_rows(max(num_rows, number), num_samples)
        if sums is not None:
            larger[: len(sums)] = sums
        return larger

    def _with_lists(self, query: QueryAlongRun, place: int, report: Report, top_k: int) -> QueryAlongRun:
        assert self._sums is not None
        assert self._ids is not None
        scores = self._sums[place] / (query.num_reports if report.similarity == "cosine" else 1)
        lists = []
        for sign in (-1, 1):
            top = TopK(top_k)
            top.update(sign * scores[None], self._ids)
            best, ids = (values[0].tolist() for values in top.compute())
            labels = labels_of(report.suspects, ids)
            lists.append(
                tuple(
                    InfluentialSample(i, labels[i], sign * score, labels[i] == query.prediction)
                    for i, score in zip(ids, best, strict=True)
                    if score > 0
                )
            )
        return replace(query, harmful=lists[0], proponents=lists[1])

    def _notes(self, keys: Sequence[int]) -> tuple[str, ...]:
        notes = [] if self._restart is None else [self._restart]
        unseen = [] if isinstance(self._wanted, int) else [i for i in self._wanted if key_of(0, i) not in keys]
        if unseen:
            notes.append(f"`along_run=` names {_ids_in_words(unseen)}, which no validation has shown")
        return tuple(notes)


def _ids_in_words(ids: Sequence[int]) -> str:
    more = f" and {len(ids) - MAX_NAMED} more" if len(ids) > MAX_NAMED else ""
    return f"validation samples {list(ids[:MAX_NAMED])}{more}"
