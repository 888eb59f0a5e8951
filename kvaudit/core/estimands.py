"""What a run can be asked, by the names that specs, reports and code share.

serving      one checkpoint under a policy against itself uncompressed: may this model be served so?
alike        a candidate against the reference, both served alike: did training change it?
deployed     a candidate as deployed against the uncompressed reference: what does its user meet?
worst        alike, under the worst of the deployable policies
interaction  the candidate's serving minus the reference's: did training make it more fragile? Never gated.
selectivity  safety's drop minus capability's
parity       capability neither worse nor better than the margin
"""

from __future__ import annotations

SERVING, ALIKE, DEPLOYED, WORST, INTERACTION = "serving", "alike", "deployed", "worst", "interaction"
SELECTIVITY, PARITY = "selectivity", "parity"
GATED = (SERVING, ALIKE, DEPLOYED, WORST, SELECTIVITY, PARITY)  # what a gate can decide, in the order of reports
FORMER = {"E1": ALIKE, "E2": DEPLOYED, "E3": WORST, "E4": SERVING}  # how the first specs wrote them
