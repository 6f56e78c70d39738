"""TEMP"""
import numpy as np
class R:
    def __init__(self, funcs, state): self.funcs, self.state = funcs, state; self.names=[f.__name__ for f in funcs]
    def __call__(self, rows, prompts, completions, completion_ids):
        keys=[k for k in rows[0] if k not in ("prompt","completion","completion_ids")]
        kw={k:[r[k] for r in rows] for k in keys}
        out=[f(prompts=prompts, completions=completions, completion_ids=completion_ids, trainer_state=self.state(), log_extra=None, log_metric=None, **kw) for f in self.funcs]
        return np.asarray([[np.nan if x is None else x for x in o] for o in out], np.float32).T
    def metrics(self): return {}
def reward_functions(funcs, classes, args, *, state, template_options): return R(funcs, state)
