#!/bin/bash
# Runs the benchmarks of docs/measurements/machines.md on a machine without Rust, from programs built elsewhere.
#
#   bench/machine.sh PROGRAMS OUT PART[=ROUNDS]...
#
# PROGRAMS is a folder with `gainshare`, `libgainshare_inside.so` and `xtask` (release builds, may be stripped).
# Every part writes its figures to OUT/PART.json, its messages to OUT/PART.log and, for the parts about cores and the
# part gpu-gain, the shares to OUT/PART.trace. Messages and shares are written as they come, so that a run that is cut
# off loses only the rest. A part that fails does not stop the others. PYTHON names the Python with PyTorch (default:
# python3). LIMIT_S is the time for all parts together: then the part that runs is ended, and no further one begins.
#
# part             what                                                                   about
# cores-three      three jobs under na, flowcon and gainshare, three rounds, plain start    8 minutes
# cores-tuned      the same without the plain start                                         6 minutes
# cores-beta       three jobs under na and flowcon with a larger part for converged jobs    4 minutes
# cores-six        six jobs, the same without the plain start                               5 minutes
# cores-quick      three jobs, one round, modes cores and weight                            6 minutes
# cores-teams      PyTorch jobs with teams of given sizes, alone and beside each other      2 minutes
# threads          a job on two cores that is left alone, four jobs together, fixed pools   5 minutes
# threads-short    the same with shorter measurements, two rounds                           3 minutes
# gpu-pace         two jobs that fill the GPU, the second one paced: PyTorch and JAX         3 minutes
# gpu-gain         three jobs on the GPU, unmanaged and under gainshare, three rounds       4 minutes
# stress           thread teams of PyTorch that change every few milliseconds               2 minutes
# doctor           what `gainshare doctor` prints                                           1 second
set -u
if [ $# -lt 3 ]; then sed -n '2,24p' "$0"; exit 2; fi
programs=$(realpath "$1"); mkdir -p "$2"; out=$(realpath "$2"); shift 2
python=$(command -v "${PYTHON:-python3}")
failed=0
rounds=3
limited() { # COMMAND...
    if [ -z "${LIMIT_S:-}" ]; then "$@"; return; fi
    local rest=$((LIMIT_S - SECONDS))
    if [ $rest -le 5 ]; then echo "no time is left: LIMIT_S is $LIMIT_S" >&2; return 124; fi
    timeout --kill-after=5 "$rest" "$@"
}
bench() { # PART ARGUMENTS...
    local part=$1; shift
    limited "$programs/xtask" bench "$@" -o json >"$out/$part.json" 2>"$out/$part.log"
}
cores() { # PART ARGUMENTS...
    local part=$1; shift
    bench "$part" cores --program "$programs/gainshare" --python "$python" --trace "$out/$part.trace" \
        --repeat "$rounds" "$@"
}
threads() { # PART ARGUMENTS...
    local part=$1; shift
    bench "$part" threads --program "$programs/gainshare" --python "$python" --repeat "$rounds" "$@"
}
gpu() { # PART ARGUMENTS...
    local part=$1; shift
    bench "$part" gpu --program "$programs/gainshare" --library "$programs/libgainshare_inside.so" \
        --python "$python" "$@"
}
here=$(dirname "$(realpath "$0")")
stress=$here/../crates/inside/tests/stress.py
teams() { # Teams of jobs alone, of three equal jobs, and of jobs of which the last one is favoured.
    local flow=17,17,67 gain=26,1,73
    limited "$python" "$here/torch/teams.py" "$out/cores-teams.json" {1,2,4,8,12,16},0,0 0,{1,2,4,8,12,16},0 \
        5,5,5 5,5,6 6,6,6 8,8,8 16,16,16 5,5,5/100/apart 8,7,1 8,0,8 8,0,8/100/apart \
        3,2,11/$flow{,/apart,/yield} 2,2,12/$flow{,/apart} 3,3,10/$flow{,/apart} 3,3,11/$flow 5,5,13/$flow \
        4,1,11/$gain{,/apart,/yield} 1,1,14/$gain{,/apart} >"$out/cores-teams.log" 2>&1
}
for wanted in "$@"; do
    began=$SECONDS
    part=${wanted%%=*}
    rounds=3
    [ "$part" = "$wanted" ] || rounds=${wanted#*=}
    case $part in
        cores-three) cores "$part" --jobs three ;;
        cores-tuned) cores "$part" --jobs three --tuned-only --pace 80,30 ;;
        cores-beta) cores "$part" --jobs three --tuned-only --pace 80,30 --policies na,flowcon --beta 1.5 ;;
        cores-six) cores "$part" --jobs six --tuned-only --pace 80,30 ;;
        cores-quick) rounds=1; cores "$part" --jobs three --modes cores,weight --tuned-only ;;
        threads) threads "$part" ;;
        threads-short) [ "$rounds" = 3 ] && rounds=2; threads "$part" --seconds 3 ;;
        gpu-pace) gpu "$part" --stories pace --jobs mlp,transformer,jax --seconds 2 ;;
        gpu-gain) gpu "$part" --stories gain --repeat "$rounds" --trace "$out/$part.trace" ;;
        cores-teams) teams ;;
        stress) limited "$python" "$stress" "$programs/libgainshare_inside.so" 120 >"$out/stress.log" 2>&1 ;;
        doctor) "$programs/gainshare" doctor >"$out/doctor.log" 2>&1 ;;
        *) echo "unknown part: $part" >&2; false ;;
    esac
    code=$?
    [ $code = 0 ] || failed=1
    echo "$wanted ended with code $code after $((SECONDS - began)) s"
    tail -n 20 "$out/$part.log" 2>/dev/null
done
exit $failed
