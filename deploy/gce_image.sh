#!/bin/bash
# Makes the image of the GPU nodes of ray_config.yaml: one driver and one software stack, so that nodes
# need seconds instead of a download of 3 GB when they start, and no later node has another driver.
#   gcloud auth login
#   make wheel && deploy/gce_image.sh PROJECT_ID
# It runs the file's own setup commands on a node with a V100, and names the image as the file does.
# Make it again for a new version of TraPPM or of its constraints: remove the old image before.
set -euo pipefail

project=${1:?"which project? deploy/gce_image.sh PROJECT_ID"}
zone=${2:-us-central1-a}
read_config() {
  ${PYTHON:-.venv/bin/python} -c '
import json, shlex, sys, yaml
config = yaml.safe_load(open("ray_config.yaml"))
v100 = config["available_node_types"]["v100"]["node_config"]
if sys.argv[1] == "image":
    print(v100["disks"][0]["initializeParams"]["sourceImage"].rpartition("/")[2])
else:
    print(" && ".join(f"( {c} )" for c in config["setup_commands"] + config["worker_setup_commands"]))
' "$1"
}
image=$(read_config image)
on=(--project="$project" --zone="$zone" --quiet)

gcloud compute instances create "$image" "${on[@]}" --machine-type=n1-standard-8 \
  --accelerator=type=nvidia-tesla-v100,count=1 --maintenance-policy=TERMINATE \
  --image-project=deeplearning-platform-release --image-family=common-cu129-ubuntu-2404-nvidia-580 \
  --boot-disk-size=200GB --metadata=install-nvidia-driver=True
trap 'gcloud compute instances delete "$image" "${on[@]}"' EXIT

on_node() {
  gcloud compute ssh "ubuntu@$image" "${on[@]}" --command "$1"
}
for tries in $(seq 60); do
  on_node nvidia-smi && break
  [ "$tries" -lt 60 ] || { echo "gce_image.sh: the driver has not come up" >&2; exit 1; }
  sleep "${PAUSE_S:-10}"
done
on_node "mkdir -p trappm && sudo apt-get purge -q -y unattended-upgrades" # which would change the driver
gcloud compute scp --recurse constraints.txt dist "ubuntu@$image:trappm/" "${on[@]}"
on_node "$(read_config commands)"
gcloud compute instances stop "$image" "${on[@]}"
gcloud compute images create "$image" --project="$project" --quiet \
  --source-disk="$image" --source-disk-zone="$zone"
