"""Trains a small Keras model: bars on the output, TensorBoard's callback, CSVLogger.

Writes what Keras itself recorded to expected.json.
"""

import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
import keras
import numpy as np

keras.utils.set_random_seed(7)
x = np.random.rand(640, 8).astype("float32")
y = x.sum(axis=1, keepdims=True)
model = keras.Sequential([keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])
model.compile("sgd", "mse", metrics=["mae"])
history = model.fit(
    x,
    y,
    epochs=3,
    batch_size=32,
    validation_split=0.2,
    callbacks=[keras.callbacks.TensorBoard("logs"), keras.callbacks.CSVLogger("training_log.csv")],
)
model.evaluate(x, y)
with open("expected.json", "w") as f:
    json.dump(history.history, f)
sys.stdout.flush()
