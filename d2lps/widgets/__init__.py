"""What people look at: widgets that live in Jupyter, in Colab, and in the built page without a kernel or a network."""

from d2lps.widgets.bet import Bet
from d2lps.widgets.choices import Choices
from d2lps.widgets.lanes import Lanes
from d2lps.widgets.plan_explorer import PlanExplorer
from d2lps.widgets.planning_explorer import PlanningExplorer
from d2lps.widgets.player import Player
from d2lps.widgets.ready import collective_player, late_ring, plan_player
from d2lps.widgets.step_player import StepPlayer
from d2lps.widgets.timetable import Timetable, schedule_explorer
from d2lps.widgets.topology_explorer import TopologyExplorer

__all__ = ["Bet", "Choices", "Lanes", "PlanExplorer", "PlanningExplorer", "Player", "StepPlayer"]
__all__ += ["Timetable", "TopologyExplorer"]
__all__ += ["collective_player", "late_ring", "plan_player", "schedule_explorer"]
