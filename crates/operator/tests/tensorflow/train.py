"""Trains a small classifier with TensorFlow's parameter servers.

All that a task knows of the others is TF_CONFIG. Servers and workers serve until they are ended; the chief trains and
prints what Keras prints.
"""

import argparse
import os

# Keras 3 cannot train with parameter servers; the Keras before it can, and TensorFlow chooses when it is imported.
os.environ["TF_USE_LEGACY_KERAS"] = "1"

import tensorflow as tf  # noqa: E402

# Threads that run operations. TensorFlow takes one for each processor that the task may use. On a node with one
# processor that is too few: the only thread of a worker waits for a tensor that the same thread would have to make.
THREADS = 8


def dataset(context):
    """Points of two classes, in an endless order that differs between workers."""

    def batch(number):
        points = tf.random.stateless_normal([32, 8], seed=[context.input_pipeline_id, number])
        return points, tf.cast(tf.reduce_sum(points[:, :3], axis=1) > 0.0, tf.int32)

    return tf.data.Dataset.counter().map(batch)


def serve(resolver):
    """Serves for ever. Settings of `tf.config` do not reach this server: it has settings of its own."""
    settings = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=THREADS)
    spec, kind, index = resolver.cluster_spec(), resolver.task_type, resolver.task_id
    tf.distribute.Server(spec, job_name=kind, task_index=index, protocol="grpc", config=settings).join()


def train(resolver, epochs, steps):
    tf.config.threading.set_inter_op_parallelism_threads(THREADS)
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    with strategy.scope():
        layers = [tf.keras.layers.Dense(32, activation="relu"), tf.keras.layers.Dense(2)]
        model = tf.keras.Sequential(layers)
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer="adam", loss=loss, metrics=["accuracy"], steps_per_execution=10)
    data = tf.keras.utils.experimental.DatasetCreator(dataset)
    history = model.fit(data, epochs=epochs, steps_per_epoch=steps, verbose=2)
    first, last = history.history["loss"][0], history.history["loss"][-1]
    print(f"the loss fell from {first:.4f} to {last:.4f}", flush=True)
    if not last < first:
        raise SystemExit("the loss did not fall")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=50, help="steps of an epoch")
    arguments = parser.parse_args()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    print(f"{resolver.task_type} {resolver.task_id} of {resolver.cluster_spec().as_dict()}", flush=True)
    if resolver.task_type in ("worker", "ps"):
        serve(resolver)
    else:
        train(resolver, arguments.epochs, arguments.steps)


if __name__ == "__main__":
    main()
