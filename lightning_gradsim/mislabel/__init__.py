"""Which training labels are probably wrong: run-long statistics of training steps, scores, flags and suggestions."""

from lightning_gradsim.mislabel.cautions import find_cautions
from lightning_gradsim.mislabel.judgement import Judgement, judge
from lightning_gradsim.mislabel.scores import DEFAULT as DEFAULT_SCORE
from lightning_gradsim.mislabel.scores import SCORES, MislabelScore, choose_columns, mislabel_score, standardise
from lightning_gradsim.mislabel.statistics import MislabelStatistics, RunAverages
from lightning_gradsim.mislabel.trusted import add_trusted, check_classes, trusted_scores
from lightning_gradsim.mislabel.visits import class_gradients

__all__ = [
    "DEFAULT_SCORE",
    "SCORES",
    "Judgement",
    "MislabelScore",
    "MislabelStatistics",
    "RunAverages",
    "add_trusted",
    "check_classes",
    "choose_columns",
    "class_gradients",
    "find_cautions",
    "judge",
    "mislabel_score",
    "standardise",
    "trusted_scores",
]
