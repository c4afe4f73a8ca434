# Starts the process of a pod of indexed-job.yaml or jobset.yaml.
#
# With ROLE (learner, actor or refresher) the pod's index counts the processes of this role;
# without, it is the process id, and there is one learner. jax would detect the pod's own Job only,
# with ids from 0, so the process id is given explicitly.

set -eu
: "${LEARNERS:=1}"
case ${ROLE-} in
  actor) first=$LEARNERS ;;
  refresher) first=$((LEARNERS + ACTORS)) ;;
  learner | '') first=0 ;;
  *) echo "unknown ROLE: $ROLE" >&2; exit 2 ;;
esac
id=$((first + JOB_COMPLETION_INDEX))
if [ -e "$RUN_DIR/config.yaml" ]; then
  begin="--resume $RUN_DIR"
else
  begin="--config $PRESETS run.dir=$RUN_DIR"
fi
set -- "$PYTHON" launch/multihost.py $begin $SETTINGS \
  topology.learners="$LEARNERS" topology.actors="$ACTORS" topology.refreshers="$REFRESHERS" \
  --coordinator "$COORDINATOR" --num-processes $((LEARNERS + ACTORS + REFRESHERS)) \
  --process-id $id
if [ $id -lt "$LEARNERS" ]; then
  exec "$@"
fi

# A helper is restarted in its pod, except after a usage error (2) or five consecutive deaths within
# ten minutes of their start; then the pod's exit code 2 fails the run. Before process 0 has a pod
# (it may be waiting for a GPU) there is nothing to join.
deaths=0
while :; do
  until getent hosts "${COORDINATOR%:*}" > /dev/null; do sleep 5; done
  SECONDS=0 code=0
  "$@" || code=$?
  if [ $code = 0 ] && [ -n "${ROLE-}" ]; then exit 0; fi
  # Code 0 also ends a helper whose learner moves to another node. An index of a Job that succeeded
  # would never run again, so without ROLE it is restarted until the Job is over.
  if [ $code = 0 ] || [ $SECONDS -ge 600 ]; then deaths=0; fi
  deaths=$((deaths + 1))
  echo "ended with code $code after $SECONDS s, consecutive deaths: $deaths" >&2
  if [ $code = 2 ] || [ $deaths = 5 ]; then exit 2; fi
  sleep $((5 * 2 ** (deaths - 1)))
done
