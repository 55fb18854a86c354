"""Per-token policy surrogates: what to minimise so that tokens of rows with advantage become likelier.

Letters: r = new / old, the policy ratio (staleness, not mismatch); A the row's advantage. Every function takes
`new_logprobs` [B, T] with gradient, `old_logprobs` [B, T], `mask` [B, T] bool and `advantages` [B], and returns a
loss per token, 0 where masked. Nothing at a masked position is read, in value or gradient. log r is clamped to
[-20, 20], as verl does: beyond it the gradient through r is 0.
"""

from app.maths.losses.cispo import cispo
from app.maths.losses.gspo import gspo, gspo_token
from app.maths.losses.ppo_clip import ppo_clip
from app.maths.losses.reinforce import reinforce
from app.maths.losses.sapo import sapo
from app.maths.losses.surrogate import Surrogate

__all__ = ["Surrogate", "cispo", "gspo", "gspo_token", "ppo_clip", "reinforce", "sapo"]
