#!/bin/bash
# Runs the benchmarks of docs/measurements/machines.md on a machine without Rust, from programs built elsewhere.
#
#   bench/machine.sh PROGRAMS OUT PART...
#
# PROGRAMS is a folder with `gainshare`, `libgainshare_inside.so` and `xtask` (release builds, may be stripped).
# Every part writes its figures to OUT/PART.json, its messages to OUT/PART.log and, for the parts about cores, the
# shares to OUT/PART.trace. A part that fails does not stop the others. PYTHON names the Python with PyTorch
# (default: python3).
#
# part             what                                                                   about
# cores-three      three jobs under na, flowcon and gainshare, three rounds, plain start    8 minutes
# cores-six        six jobs, the same without the plain start                               8 minutes
# cores-quick      three jobs, one round, modes cores and weight                            6 minutes
# cores-teams      PyTorch jobs with teams of given sizes, alone and beside each other      2 minutes
# threads          a job on two cores that is left alone, four jobs together, fixed pools   4 minutes
# gpu-pace         two jobs of PyTorch that fill the GPU, the second one paced              3 minutes
# gpu-pace-jax     the same with JAX                                                        2 minutes
# gpu-gain         three jobs on the GPU, unmanaged and under gainshare                     4 minutes
# stress           thread teams of PyTorch that change every few milliseconds               2 minutes
# doctor           what `gainshare doctor` prints                                           1 second
set -u
if [ $# -lt 3 ]; then sed -n '2,22p' "$0"; exit 2; fi
programs=$(realpath "$1"); mkdir -p "$2"; out=$(realpath "$2"); shift 2
python=$(command -v "${PYTHON:-python3}")
failed=0
bench() { # PART ARGUMENTS...
    local part=$1; shift
    "$programs/xtask" bench "$@" -o json >"$out/$part.json" 2>"$out/$part.log"
}
cores() { # PART ARGUMENTS...
    local part=$1; shift
    bench "$part" cores --program "$programs/gainshare" --python "$python" --trace "$out/$part.trace" "$@"
}
pace() { # PART KINDS
    bench "$1" gpu --stories pace --jobs "$2" --library "$programs/libgainshare_inside.so" --python "$python" --seconds 3
}
here=$(dirname "$(realpath "$0")")
stress=$here/../crates/inside/tests/stress.py
teams() { # Teams of jobs alone, of three equal jobs, and of jobs of which the last one is favoured.
    local flow=17,17,67 gain=26,1,73
    "$python" "$here/torch/teams.py" "$out/cores-teams.json" {1,2,4,8,12,16},0,0 0,{1,2,4,8,12,16},0 \
        5,5,5 5,5,6 6,6,6 8,8,8 16,16,16 5,5,5/100/apart 8,7,1 8,0,8 8,0,8/100/apart \
        3,2,11/$flow{,/apart,/yield} 2,2,12/$flow{,/apart} 3,3,10/$flow{,/apart} 3,3,11/$flow 5,5,13/$flow \
        4,1,11/$gain{,/apart,/yield} 1,1,14/$gain{,/apart} >"$out/cores-teams.log" 2>&1
}
for part in "$@"; do
    began=$SECONDS
    case $part in
        cores-three) cores "$part" --jobs three ;;
        cores-six) cores "$part" --jobs six --tuned-only ;;
        cores-quick) cores "$part" --jobs three --repeat 1 --modes cores,weight --tuned-only ;;
        threads) bench "$part" threads --program "$programs/gainshare" --python "$python" ;;
        gpu-pace) pace "$part" mlp,transformer ;;
        gpu-pace-jax) pace "$part" jax ;;
        cores-teams) teams ;;
        stress) "$python" "$stress" "$programs/libgainshare_inside.so" 120 >"$out/stress.log" 2>&1 ;;
        gpu-gain) bench "$part" gpu --stories gain --program "$programs/gainshare" --python "$python" --trace "$out/$part.trace" ;;
        doctor) "$programs/gainshare" doctor >"$out/doctor.log" 2>&1 ;;
        *) echo "unknown part: $part" >&2; false ;;
    esac
    code=$?
    [ $code = 0 ] || failed=1
    echo "$part ended with code $code after $((SECONDS - began)) s"
    tail -n 20 "$out/$part.log" 2>/dev/null
done
exit $failed
