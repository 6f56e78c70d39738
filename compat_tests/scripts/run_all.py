"""Runs scripts one after another in one process, to import only once: run_all.py MODEL DATA OUT SCRIPT..."""

import contextlib
import io
import json
import runpy
import sys
import traceback
from pathlib import Path

if __name__ == "__main__":
    model, data, out, *scripts = sys.argv[1:]
    told = {}
    for script in scripts:
        name = Path(script).stem
        sys.argv = [script, model, data, str(Path(out) / name)]
        printed, code, error = io.StringIO(), 0, ""
        with contextlib.redirect_stdout(printed):
            try:
                runpy.run_path(script, run_name="__main__")
            except SystemExit as leaving:
                code = leaving.code or 0
            except Exception:  # print the traceback and exit with 1, as Python would
                code, error = 1, traceback.format_exc()
        told[name] = {"code": code, "printed": printed.getvalue(), "error": error}
    Path(out, "told.json").write_text(json.dumps(told))
