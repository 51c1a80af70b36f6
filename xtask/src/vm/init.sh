#!/vm/busybox sh
# Process 1 of a virtual machine: what a node has mounted, then /vm/run, then the end. Its results go to the second
# serial line, so that the kernel's messages on the first one cannot split them.
B=/vm/busybox
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root

# pivot_root(2) refuses the file system that the kernel started with: enter a bind mount of it, as a runtime needs.
if [ "$1" != inside ]; then
    $B mount --bind / /mnt && cd /mnt && $B mount --move . / && exec $B chroot . /vm/busybox sh /vm/init inside
fi

$B mount -t proc proc /proc
$B mount -t sysfs sys /sys
$B mount -t devtmpfs dev /dev
$B mkdir -p /dev/pts /dev/shm
$B mount -t devpts devpts /dev/pts
$B mount -t tmpfs -o mode=755 run /run
$B mount -t cgroup2 cgroup2 /sys/fs/cgroup
exec > /dev/ttyS1 2>&1

# It ends also when nobody watches any more.
($B sleep "$($B cat /vm/limit)" && $B poweroff -f) &

for module in $($B cat /vm/modules); do
    $B insmod "/vm/lib/$module.ko" || echo "cannot load $module"
done
$B ip link set lo up
cd /tmp
$B sh /vm/run
$B poweroff -f
