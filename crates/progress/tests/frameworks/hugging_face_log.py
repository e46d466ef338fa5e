"""Prints through transformers' own callbacks, as its Trainer does.

The Trainer itself needs a newer PyTorch than Debian's.
"""

from transformers.trainer_callback import PrinterCallback, ProgressCallback, TrainerState

state = TrainerState(max_steps=30, is_local_process_zero=True, is_world_process_zero=True)


def logs(step):
    return {"loss": round(1 / step, 4), "grad_norm": 1.25, "learning_rate": 5e-05, "epoch": step / 20}


progress = ProgressCallback()
progress.on_train_begin(None, state, None)
for step in range(1, 31):
    state.global_step = step
    progress.on_step_end(None, state, None)
    if step % 10 == 0:
        progress.on_log(None, state, None, logs=logs(step))
progress.on_train_end(None, state, None)
print()
PrinterCallback().on_log(None, state, None, logs={"train_runtime": 12.5, "train_loss": 0.375, "epoch": 1.5})
