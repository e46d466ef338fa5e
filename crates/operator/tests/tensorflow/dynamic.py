"""Trains a line with TensorFlow's servers and workers that may come and go.

The job has `enableDynamicWorker`: the sparse TF_CONFIG of a worker has the worker and all servers, that of a server
only the server. So every task boots alone, and a worker passes its view of the cluster to the servers when its session
begins. Workers train by themselves on common variables, and end after a number of steps; servers serve until they are
ended.
"""

import argparse
import json
import os
import time

import tensorflow as tf

v1 = tf.compat.v1
# See train.py: one thread for each processor may be too few.
THREADS = 8


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="steps of each worker")
    parser.add_argument("--fails", type=int, default=-1, help="the worker of this number fails at once")
    arguments = parser.parse_args()
    config = json.loads(os.environ["TF_CONFIG"])
    cluster, task = config["sparseCluster"], config["task"]
    print(f"{task['type']} {task['index']} of {cluster}", flush=True)
    if task["type"] == "worker" and task["index"] == arguments.fails:
        raise SystemExit("this worker fails, as it was asked to")
    threads = v1.ConfigProto(inter_op_parallelism_threads=THREADS)
    if task["type"] == "ps":
        boot(cluster["ps"][0], threads).join()
    else:
        workers = {int(index): address for index, address in cluster["worker"].items()}
        train(tf.train.ClusterSpec({"ps": cluster["ps"], "worker": workers}), task["index"], arguments.steps, threads)


def boot(address, settings):
    """A server of its own. A session must not name a task as it was named here."""
    return tf.distribute.Server({"boot": [address]}, job_name="boot", task_index=0, config=settings)


def train(spec, index, steps, settings):
    server = boot(spec.task_address("worker", index), settings)
    with tf.Graph().as_default():
        device = f"/job:worker/task:{index}"
        setter = v1.train.replica_device_setter(worker_device=device, cluster=spec)
        with v1.device(setter):
            slope = v1.get_variable("slope", [], initializer=v1.zeros_initializer())
            offset = v1.get_variable("offset", [], initializer=v1.zeros_initializer())
            points = tf.random.normal([32], seed=index)
            loss = tf.reduce_mean(tf.square(slope * points + offset - (3.0 * points - 1.0)))
            step = v1.train.GradientDescentOptimizer(0.05).minimize(loss)
            missing = v1.report_uninitialized_variables()
        settings.cluster_def.CopyFrom(spec.as_cluster_def())
        # Otherwise every session would have variables of its own.
        settings.experimental.share_session_state_in_clusterspec_propagation = True
        with v1.Session(server.target, config=settings) as session:
            if index == 0:
                session.run(v1.global_variables_initializer())
            while session.run(missing).size:
                time.sleep(0.2)
            for number in range(1, steps + 1):
                value, _ = session.run([loss, step])
                if number % 50 == 0:
                    print(f"step {number}/{steps} loss {value:.6f}", flush=True)
            slope_now, offset_now = session.run([slope, offset])
    print(f"the line is {slope_now:.2f} x {offset_now:+.2f}", flush=True)
    if abs(slope_now - 3.0) > 0.2 or abs(offset_now + 1.0) > 0.2:
        raise SystemExit("the line was not found")


if __name__ == "__main__":
    main()
