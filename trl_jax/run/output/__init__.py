"""The output of a run: checkpoints, the files of the model, the Hub; and how a run resumes from it."""
