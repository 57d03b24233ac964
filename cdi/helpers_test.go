// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	specs "tags.cncf.io/container-device-interface/specs-go"
)

const (
	uuidA         = "GPU-6a1c0b1e-0000-4000-8000-00000000000a"
	uuidB         = "GPU-6a1c0b1e-0000-4000-8000-00000000000b"
	driverVersion = "580.159.04"
)

func write(t *testing.T, file, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func link(t *testing.T, target, file string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(target, file); err != nil {
		t.Fatal(err)
	}
}

func information(model, uuid, bus string, minor int) string {
	return fmt.Sprintf("Model: \t\t %s\nIRQ:   \t\t 32\nGPU UUID: \t %s\nVideo BIOS: \t ??.??.??.??.??\n"+
		"Bus Type: \t PCIe\nDMA Size: \t 52 bits\nBus Location: \t %s\nDevice Minor: \t %d\n"+
		"GPU Firmware: \t %s\nGPU Excluded:\t No\n", model, uuid, bus, minor, driverVersion)
}

// fakeHost makes the root of a host with two GPUs. The minors run against the
// bus order, as they do where GPUs were probed in another order.
func fakeHost(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	at := func(p string) string { return filepath.Join(root, p) }
	write(t, at("/proc/driver/nvidia/version"),
		"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  "+driverVersion+"  Release Build  (build@host)\nGCC version:  gcc 13.2.0\n")
	write(t, at(procGPUs+"/0000:9b:00.0/information"), information("NVIDIA H200", uuidB, "0000:9B:00.0", 0))
	write(t, at(procGPUs+"/0000:17:00.0/information"), information("NVIDIA H200", uuidA, "0000:17:00.0", 1))
	for _, node := range []string{"nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"} {
		write(t, at("/dev/"+node), "")
	}
	lib := "/usr/lib/x86_64-linux-gnu/"
	for _, l := range []struct{ file, soname string }{
		{"libcuda.so." + driverVersion, "libcuda.so.1"},
		{"libnvidia-ml.so." + driverVersion, "libnvidia-ml.so.1"},
		{"libnvidia-ptxjitcompiler.so." + driverVersion, "libnvidia-ptxjitcompiler.so.1"},
		{"libnvidia-gpucomp.so." + driverVersion, "libnvidia-gpucomp.so." + driverVersion},
		{"libnvidia-tileiras.so." + driverVersion, "libnvidia-tileiras.so." + driverVersion}, // new with CUDA 13.1
		{"libnvidia-nvvm70.so.4", "libnvidia-nvvm70.so.4"},
		{"libnvidia-glcore.so." + driverVersion, "libnvidia-glcore.so." + driverVersion}, // graphics: not wanted
		{"libcuda.so.470.1", "libcuda.so.1"},                                             // of an older driver
	} {
		write(t, at(lib+l.file), string(sharedLibrary(l.soname, 62)))
	}
	link(t, "libcuda.so.1", at(lib+"libcuda.so"))
	link(t, "libcuda.so."+driverVersion, at(lib+"libcuda.so.1"))
	link(t, "nowhere", at(lib+"libcuda.so.2")) // dangling
	// An absolute link must be followed inside the root.
	link(t, lib+"libnvidia-ml.so."+driverVersion, at(lib+"libnvidia-ml.so.1"))
	// 32-bit libraries come first on some systems.
	write(t, at("/usr/lib64/libcuda.so."+driverVersion), string(sharedLibrary("libcuda.so.1", 3)))
	write(t, at("/usr/bin/nvidia-smi"), "")
	write(t, at("/usr/bin/nvidia-cdi-hook"), "") // the toolkit's; testdata/nvidia.yaml has it
	return root
}

// sharedLibrary makes the least of a 64-bit ELF file that has a soname; machine
// is its e_machine.
func sharedLibrary(soname string, machine uint16) []byte {
	strtab := "\x00" + soname + "\x00"
	const head, section = 64, 64
	dynAt := uint64(head)
	strAt := dynAt + 32
	shAt := (strAt + uint64(len(strtab)) + 7) &^ 7
	var b bytes.Buffer
	put := func(values ...any) {
		for _, v := range values {
			if err := binary.Write(&b, binary.LittleEndian, v); err != nil {
				panic(err)
			}
		}
	}
	b.WriteString("\x7fELF\x02\x01\x01")
	b.Write(make([]byte, 9))
	put(uint16(3), machine, uint32(1), uint64(0), uint64(0), shAt, uint32(0),
		uint16(head), uint16(0), uint16(0), uint16(section), uint16(3), uint16(2))
	put(uint64(14), uint64(1), uint64(0), uint64(0)) // DT_SONAME at 1 of the strings, DT_NULL
	b.WriteString(strtab)
	b.Write(make([]byte, int(shAt)-b.Len()))
	b.Write(make([]byte, section))
	put(uint32(0), uint32(6), uint64(0), uint64(0), dynAt, uint64(32), uint32(2), uint32(0), uint64(8), uint64(16))
	put(uint32(0), uint32(3), uint64(0), uint64(0), strAt, uint64(len(strtab)), uint32(0), uint32(0), uint64(1), uint64(0))
	return b.Bytes()
}

// Edits returns everything that the named devices of spec bring, as one: the
// spec's own edits once, then each device's. It is what a runtime does that
// injects the devices. The error names a device that is not in the spec.
func Edits(spec *specs.Spec, names ...string) (specs.ContainerEdits, error) {
	edits := copyEdits(spec.ContainerEdits)
	for _, name := range names {
		i := slices.IndexFunc(spec.Devices, func(d specs.Device) bool { return d.Name == name })
		if i < 0 {
			return specs.ContainerEdits{}, fmt.Errorf("no device %q in the spec of %s", name, spec.Kind)
		}
		edits = merge(edits, copyEdits(spec.Devices[i].ContainerEdits))
	}
	return edits, nil
}
