"""Trains a small classifier with TensorFlow's sessions: each worker trains by itself, and a server keeps the model.

A worker knows itself and the servers only, so workers may come and go. That is the sparse form of TF_CONFIG, which
TensorFlow's own reader of TF_CONFIG does not know: programs read it themselves.
"""

import argparse
import json
import os
import time

import tensorflow as tf

tf1 = tf.compat.v1


def train(server, index, steps):
    """Trains until all workers together have made so many steps."""
    tf1.disable_eager_execution()
    with tf1.device(tf1.train.replica_device_setter(ps_tasks=1, worker_device=f"/job:worker/task:{index}")):
        count = tf1.train.get_or_create_global_step()
        points = tf.random.normal([32, 8], seed=index)
        labels = tf.cast(tf.reduce_sum(points[:, :3], axis=1, keepdims=True) > 0.0, tf.float32)
        weights = tf1.get_variable("weights", [8, 1])
        errors = tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=tf.matmul(points, weights))
        loss = tf.reduce_mean(errors)
        update = tf1.train.GradientDescentOptimizer(0.5).minimize(loss, global_step=count)
        begin, missing = tf1.global_variables_initializer(), tf1.report_uninitialized_variables()
    with tf1.Session(server.target) as session:
        while len(session.run(missing)) > 0:
            if index == 0:
                session.run(begin)
            else:
                time.sleep(0.2)
        losses = []
        while session.run(count) < steps or not losses:
            losses.append(session.run([loss, update])[0])
    print(f"worker {index} made {len(losses)} steps, loss {losses[-1]:.4f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="steps of all workers together")
    arguments = parser.parse_args()
    config = json.loads(os.environ["TF_CONFIG"])
    kind, index = config["task"]["type"], config["task"]["index"]
    cluster = {role: tasks for role, tasks in config["sparseCluster"].items() if tasks}
    print(f"{kind} {index} of {cluster}", flush=True)
    server = tf.distribute.Server(tf.train.ClusterSpec(cluster), job_name=kind, task_index=index, protocol="grpc")
    if kind == "ps":
        server.join()
    else:
        train(server, index, arguments.steps)


if __name__ == "__main__":
    main()
