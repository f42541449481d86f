#!/bin/sh
# The first process of a node, in mount, PID and UTS namespaces of its own: it prepares the mounts,
# then runs containerd and the kubelet, and restarts them, as systemd does on a real machine.
# usage: node_init.sh NODE FOLDER CLUSTER-FOLDER INSTALLATION KUBELET-COMMAND...
set -eu
node=$1 folder=$2 cluster=$3 installation=$4
shift 4
hostname "$node"

# The machine's own containers would stay mounted here after their end.
while read -r _ where kind _; do
	case $where in / | /proc) continue ;; esac
	case $kind in overlay | nsfs) umount --lazy "$where" ;; esac
done </proc/self/mounts
mount --make-rshared /
mount -t tmpfs -o mode=755 tmpfs /run

# A /var of its own, on the node's disk: the paths of some files in it are fixed. What is needed of
# the machine's /var is mounted at its old place.
mkdir -p "$folder/var/lib" "$folder/var/log" "$folder/var/tmp" /run/cluster /run/installation
[ -L "$folder/var/run" ] || ln -s /run "$folder/var/run"
mount --bind "$cluster" /run/cluster
mount --bind "$installation" /run/installation
mount --bind "$folder/var" /var
mkdir -p "$cluster" "$installation"
mount --bind /run/cluster "$cluster"
mount --bind /run/installation "$installation"

# The kubelet sets these for the whole machine: here it writes to copies.
for setting in vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops \
	kernel/keys/root_maxkeys kernel/keys/root_maxbytes; do
	copy=/run/settings/$setting
	mkdir -p "${copy%/*}"
	cat "/proc/sys/$setting" >"$copy"
	mount --bind "$copy" "/proc/sys/$setting"
done

keep_running() {
	while :; do
		"$@" || true
		sleep 1
	done
}

keep_running containerd --config "$folder/containerd.toml" >>"$folder/containerd.log" 2>&1 &
until [ -S "$folder/containerd.sock" ]; do sleep 0.1; done
keep_running "$@" >>"$folder/kubelet.log" 2>&1 &
wait
