"""Returns and advantages when each context-parallel rank holds only its zigzag slice of every response."""

from cp_returns.baselines import group_advantage as group_advantage
from cp_returns.collectives import alone as alone
from cp_returns.collectives import over as over
from cp_returns.config import ReturnsConfig as ReturnsConfig
from cp_returns.context import CPContext as CPContext
from cp_returns.context import carry as carry
from cp_returns.context import gather as gather
from cp_returns.errors import CPCollectiveError as CPCollectiveError
from cp_returns.errors import CPInputError as CPInputError
from cp_returns.estimators import GAE as GAE
from cp_returns.estimators import gae as gae
from cp_returns.estimators import reinforce_plus_plus as reinforce_plus_plus
from cp_returns.estimators import reinforce_plus_plus_baseline as reinforce_plus_plus_baseline
from cp_returns.estimators import remax as remax
from cp_returns.kl import approx_kl as approx_kl
from cp_returns.layout import Layout as Layout
from cp_returns.layout import contiguous as contiguous
from cp_returns.layout import contiguous_pack as contiguous_pack
from cp_returns.layout import zigzag as zigzag
from cp_returns.module import ContextParallelReturns as ContextParallelReturns
from cp_returns.scan import reverse_scan as reverse_scan
from cp_returns.whiten import whiten as whiten
