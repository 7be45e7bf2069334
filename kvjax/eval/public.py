"""The public benchmarks that are read from local files (`Spec.data`), by name."""

from __future__ import annotations

from kvjax.eval.case import Maker
from kvjax.eval.gsm8k import GSM8K
from kvjax.eval.longbench import LONGBENCH
from kvjax.eval.xsum import XSUM

PUBLIC: dict[str, Maker] = {**LONGBENCH, **GSM8K, **XSUM}
