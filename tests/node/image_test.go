// SPDX-License-Identifier: Apache-2.0

package node

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"
)

func readTar(t *testing.T, data []byte) (names []string, content map[string][]byte) {
	t.Helper()
	content = map[string][]byte{}
	for r := tar.NewReader(bytes.NewReader(data)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return names, content
		}
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		name := strings.TrimSuffix(h.Name, "/")
		names = append(names, name)
		content[name] = b
	}
}

func TestLayerHasParentsFirst(t *testing.T) {
	r := newRootfs()
	r.text("a/b/c/d", "x")
	layer, err := r.layer()
	if err != nil {
		t.Fatal(err)
	}
	names, content := readTar(t, layer)
	seen := map[string]bool{".": true}
	for _, name := range names {
		if !seen[path.Dir(name)] {
			t.Errorf("%s comes before its directory", name)
		}
		seen[name] = true
	}
	if string(content["a/b/c/d"]) != "x" {
		t.Errorf("a/b/c/d holds %q", content["a/b/c/d"])
	}
}

func TestImageBlobsMatchTheirNames(t *testing.T) {
	file := filepath.Join(t.TempDir(), "image.tar")
	if err := newRootfs().writeImage(file, "localhost/x:1", "/bin/x"); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	names, content := readTar(t, data)
	blobs := 0
	for _, name := range names {
		if strings.HasPrefix(name, "blobs/") {
			blobs++
			if want := blobPath(content[name]); name != want {
				t.Errorf("blob %s has the content of %s", name, want)
			}
		}
	}
	if blobs != 3 {
		t.Errorf("%d blobs, want layer, config and manifest", blobs)
	}
	var index struct {
		Manifests []struct {
			Digest      string
			Annotations map[string]string
		}
	}
	if err := json.Unmarshal(content["index.json"], &index); err != nil {
		t.Fatal(err)
	}
	manifest := index.Manifests[0]
	if name := "blobs/" + strings.Replace(manifest.Digest, ":", "/", 1); content[name] == nil {
		t.Errorf("there is no %s", name)
	}
	if name := manifest.Annotations["io.containerd.image.name"]; name != "localhost/x:1" {
		t.Errorf("the image is called %q", name)
	}
}

// podman gets the same files as containerd, unpacked.
func TestDirHasWhatTheLayerHas(t *testing.T) {
	r := newRootfs()
	r.text("a/b", "x")
	dir := filepath.Join(t.TempDir(), "root")
	if err := r.writeDir(dir); err != nil {
		t.Fatal(err)
	}
	for name, want := range r.files {
		info, err := os.Lstat(filepath.Join(dir, name))
		if err != nil {
			t.Error(err)
			continue
		}
		if want.mode&fs.ModeSymlink == 0 && info.Mode() != want.mode {
			t.Errorf("%s has mode %v, want %v", name, info.Mode(), want.mode)
		}
	}
	if data, _ := os.ReadFile(filepath.Join(dir, "a/b")); string(data) != "x" {
		t.Errorf("a/b holds %q", data)
	}
}

// A program's image has the libraries that its loader needs and the machine has.
func TestProgramBringsItsLibraries(t *testing.T) {
	r := newRootfs()
	if err := r.copyProgram("usr/bin/sleep", "/usr/bin/sleep"); err != nil {
		t.Fatal(err)
	}
	var loader, libc bool
	for name := range r.files {
		loader = loader || strings.HasPrefix(path.Base(name), "ld-linux")
		libc = libc || path.Base(name) == "libc.so.6"
	}
	if !loader || !libc {
		t.Errorf("loader there: %v, C library there: %v", loader, libc)
	}
}
