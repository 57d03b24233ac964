// SPDX-License-Identifier: Apache-2.0

package rm

import (
	"os"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// stated is a driver that has the node of another device; it notes which links it is asked of.
type stated struct {
	Nvidia
	links []string
}

func (s *stated) May(path, link string) bool {
	s.links = append(s.links, link)
	return s.Nvidia.May(path, link) || link == "/dev/null" && isDevice(unix.AT_FDCWD, path, 0, 1, 3)
}

// A descriptor is known by its link; only a device node is asked what it is.
func TestDescriptors(t *testing.T) {
	null, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	file, err := os.Create(t.TempDir() + "/file")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	d := stated{Nvidia: Nvidia{node: "/dev/nvidiactl"}}
	all, err := descriptors(&d, os.Getpid())
	if err != nil || !slices.Contains(all, int(null.Fd())) || slices.Contains(all, int(file.Fd())) || !slices.Contains(d.links, file.Name()) {
		t.Errorf("%v, %v of %q", all, err, d.links)
	}
	if d.Is(int(null.Fd())) || d.Is(int(file.Fd())) {
		t.Error("another file is the driver's")
	}
}
