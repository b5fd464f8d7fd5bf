"""The command line's commands as functions: `import confide; confide.train("convex/digits", "runs/a")`.

Every function does what the command of its name does, by the same calls, and returns what `--json` prints, or an object
that holds it. Mistakes raise `confide.UserError` with the message that the command line would have printed.
"""

from confide.api.models import compare as compare
from confide.api.models import evaluate as evaluate
from confide.api.models import export as export
from confide.api.models import guarantee as guarantee
from confide.api.models import publish as publish
from confide.api.models import release as release
from confide.api.models import retrieve as retrieve
from confide.api.models import transcribe as transcribe
from confide.api.runs import Run as Run
from confide.api.runs import Sets as Sets
from confide.api.runs import load as load
from confide.api.runs import resume as resume
from confide.api.runs import train as train
from confide.api.studies import audit as audit
from confide.api.studies import diagnose as diagnose
from confide.api.studies import plan as plan
from confide.api.studies import sweep as sweep
from confide.settings import allow_code as allow_code
