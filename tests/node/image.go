// SPDX-License-Identifier: Apache-2.0

package node

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"debug/elf"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"sort"
	"strings"
)

// Image names. No registry has these images, so a missing image is an error and never
// a download.
const (
	PauseImage    = "localhost/nvshare-pause:1"
	WorkloadImage = "localhost/nvshare-workload:1"
)

// muslLibrary is the name by which musl's programs and libraries load their C library.
const muslLibrary = "libc.so"

// UserLibrary is a library in the workload image that does nothing.
const UserLibrary = "/opt/user.so"

// rootfs collects the files of an image by their path in it.
type rootfs struct {
	files map[string]file
}

type file struct {
	mode fs.FileMode
	link string // target, for a symbolic link
	data []byte
}

// newRootfs returns a file system with a merged /usr, that has only what a C program
// needs besides its libraries.
func newRootfs() *rootfs {
	r := &rootfs{files: map[string]file{}}
	for _, d := range []string{"bin", "lib", "lib64", "sbin"} {
		r.files[d] = file{mode: fs.ModeSymlink | 0o777, link: "usr/" + d}
		r.dir("usr/" + d)
	}
	for _, d := range []string{"dev", "proc", "sys", "run", "root", "etc", "var", "opt", "record"} {
		r.dir(d)
	}
	r.files["tmp"] = file{mode: fs.ModeDir | fs.ModeSticky | 0o777}
	r.files["var/run"] = file{mode: fs.ModeSymlink | 0o777, link: "../run"}
	r.text("etc/passwd", "root:x:0:0:root:/root:/bin/false\nnobody:x:65534:65534:nobody:/:/bin/false\n")
	r.text("etc/group", "root:x:0:\nnogroup:x:65534:\n")
	r.text("etc/ld.so.conf", "include /etc/ld.so.conf.d/*.conf\n")
	r.dir("etc/ld.so.conf.d")
	return r
}

func (r *rootfs) dir(name string) { r.files[name] = file{mode: fs.ModeDir | 0o755} }

func (r *rootfs) text(name, text string) { r.files[name] = file{mode: 0o644, data: []byte(text)} }

// copyFile copies the machine's file host to name.
func (r *rootfs) copyFile(name, host string) error {
	data, err := os.ReadFile(host)
	if err != nil {
		return err
	}
	info, err := os.Stat(host)
	if err != nil {
		return err
	}
	r.files[name] = file{mode: 0o755 | info.Mode()&fs.ModeSetuid, data: data}
	return nil
}

// copyProgram copies the machine's program host to name, with its loader and libraries.
// Libraries that the machine lacks are left out: CDI brings the driver's.
func (r *rootfs) copyProgram(name, host string) error {
	if err := r.copyFile(name, host); err != nil {
		return err
	}
	return r.copyLibraries(host)
}

func (r *rootfs) copyLibraries(host string) error {
	f, err := elf.Open(host)
	var other *elf.FormatError
	if errors.As(err, &other) {
		return nil // it is no program
	}
	if err != nil {
		return fmt.Errorf("%s: %w", host, err)
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type != elf.PT_INTERP {
			continue
		}
		interp, err := io.ReadAll(p.Open())
		if err != nil {
			return err
		}
		loader := strings.TrimRight(string(interp), "\x00")
		if err := r.copyFile(mergedUsr(loader), loader); err != nil {
			return err
		}
	}
	needed, err := f.ImportedLibraries()
	if err != nil {
		return fmt.Errorf("%s: %w", host, err)
	}
	for _, lib := range needed {
		if lib == muslLibrary { // the same file as the loader, which is copied already
			continue
		}
		if err := r.copyLibrary(lib); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// copyLibrary copies a library of the machine, and the libraries that it needs, to the
// same paths. fs.ErrNotExist means that the machine lacks the library.
func (r *rootfs) copyLibrary(lib string) error {
	at, err := findLibrary(lib)
	if err != nil {
		return err
	}
	name := mergedUsr(at)
	if _, have := r.files[name]; have {
		return nil
	}
	if err := r.copyFile(name, at); err != nil {
		return err
	}
	return r.copyLibraries(at)
}

// copyCLibrary copies the libraries that every image with glibc has. The driver's
// libraries are linked with some of them.
func (r *rootfs) copyCLibrary() error {
	for _, lib := range []string{"libpthread.so.0", "libdl.so.2", "librt.so.1", "libm.so.6"} {
		if err := r.copyLibrary(lib); err != nil {
			return err
		}
	}
	return nil
}

func findLibrary(lib string) (string, error) {
	for _, dir := range libraryDirs() {
		at := path.Join(dir, lib)
		if _, err := os.Stat(at); err == nil {
			return at, nil
		}
	}
	return "", fmt.Errorf("library %s: %w in %v", lib, fs.ErrNotExist, libraryDirs())
}

func libraryDirs() []string {
	arch := map[string]string{"amd64": "x86_64", "arm64": "aarch64"}[runtime.GOARCH]
	return []string{"/lib/" + arch + "-linux-gnu", "/usr/lib/" + arch + "-linux-gnu", "/lib64", "/usr/lib64", "/usr/lib"}
}

// mergedUsr maps an absolute path to its path in an image with a merged /usr.
func mergedUsr(abs string) string {
	name := strings.TrimPrefix(abs, "/")
	if strings.HasPrefix(name, "lib") {
		return "usr/" + name
	}
	return name
}

// names lists all paths, parents first.
func (r *rootfs) names() []string {
	for name := range r.files {
		for d := path.Dir(name); d != "."; d = path.Dir(d) {
			if _, ok := r.files[d]; !ok {
				r.dir(d)
			}
		}
	}
	names := make([]string, 0, len(r.files))
	for name := range r.files {
		names = append(names, name)
	}
	sort.Strings(names)
	return names
}

// writeDir makes the file system in the new directory dir.
func (r *rootfs) writeDir(dir string) error {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	for _, name := range r.names() {
		at, f := filepath.Join(dir, name), r.files[name]
		var err error
		switch {
		case f.mode.IsDir():
			// Mkdir applies the umask and ignores the sticky bit; Chmod does neither.
			err = errors.Join(os.Mkdir(at, f.mode.Perm()), os.Chmod(at, f.mode))
		case f.mode&fs.ModeSymlink != 0:
			err = os.Symlink(f.link, at)
		default:
			err = errors.Join(os.WriteFile(at, f.data, f.mode), os.Chmod(at, f.mode))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// layer returns the file system as an uncompressed tar.
func (r *rootfs) layer() ([]byte, error) {
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, name := range r.names() {
		f := r.files[name]
		h := &tar.Header{Name: name, Mode: int64(f.mode.Perm()), Size: int64(len(f.data)), Typeflag: tar.TypeReg}
		if f.mode&fs.ModeSetuid != 0 {
			h.Mode |= 0o4000
		}
		switch {
		case f.mode.IsDir():
			h.Typeflag, h.Name = tar.TypeDir, name+"/"
			if f.mode&fs.ModeSticky != 0 {
				h.Mode |= 0o1000
			}
		case f.mode&fs.ModeSymlink != 0:
			h.Typeflag, h.Linkname = tar.TypeSymlink, f.link
		}
		if err := w.WriteHeader(h); err != nil {
			return nil, fmt.Errorf("image file %s: %w", name, err)
		}
		if _, err := w.Write(f.data); err != nil {
			return nil, fmt.Errorf("image file %s: %w", name, err)
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return buf.Bytes(), nil
}

// writeImage writes an image of one layer as a tar of an OCI layout.
func (r *rootfs) writeImage(to, name string, entrypoint ...string) error {
	layer, err := r.layer()
	if err != nil {
		return err
	}
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH,
		"os":           "linux",
		"config": map[string]any{
			"Env":        []string{"PATH=/usr/sbin:/usr/bin"},
			"Entrypoint": entrypoint,
			"WorkingDir": "/",
		},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{digest(layer)}},
	})
	if err != nil {
		return err
	}
	type descriptor struct {
		MediaType   string            `json:"mediaType"`
		Digest      string            `json:"digest"`
		Size        int               `json:"size"`
		Annotations map[string]string `json:"annotations,omitempty"`
	}
	const oci = "application/vnd.oci.image."
	manifest, err := json.Marshal(map[string]any{
		"schemaVersion": 2,
		"mediaType":     oci + "manifest.v1+json",
		"config":        descriptor{oci + "config.v1+json", digest(config), len(config), nil},
		"layers":        []descriptor{{oci + "layer.v1.tar", digest(layer), len(layer), nil}},
	})
	if err != nil {
		return err
	}
	index, err := json.Marshal(map[string]any{
		"schemaVersion": 2,
		"mediaType":     oci + "index.v1+json",
		"manifests": []descriptor{{oci + "manifest.v1+json", digest(manifest), len(manifest),
			map[string]string{"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name}}},
	})
	if err != nil {
		return err
	}

	f, err := os.Create(to)
	if err != nil {
		return err
	}
	defer f.Close()
	w := tar.NewWriter(f)
	for _, entry := range []struct {
		name string
		data []byte
	}{
		{"oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)},
		{"index.json", index},
		{blobPath(layer), layer},
		{blobPath(config), config},
		{blobPath(manifest), manifest},
	} {
		if err := w.WriteHeader(&tar.Header{Name: entry.name, Mode: 0o644, Size: int64(len(entry.data))}); err != nil {
			return err
		}
		if _, err := w.Write(entry.data); err != nil {
			return err
		}
	}
	return errors.Join(w.Close(), f.Close())
}

// ImportDir makes an image of the files below dir and imports it. containerd must run.
func (n *Node) ImportDir(ctx context.Context, name, dir string, entrypoint ...string) error {
	r := &rootfs{files: map[string]file{}}
	if err := filepath.WalkDir(dir, func(at string, d fs.DirEntry, err error) error {
		if err != nil || at == dir {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		f := file{mode: info.Mode()}
		switch {
		case info.Mode().IsRegular():
			f.data, err = os.ReadFile(at)
		case info.Mode()&fs.ModeSymlink != 0:
			f.link, err = os.Readlink(at)
		}
		r.files[strings.TrimPrefix(at, dir+"/")] = f
		return err
	}); err != nil {
		return fmt.Errorf("image of %s: %w", dir, err)
	}
	tar := filepath.Join(n.private, "image.tar")
	if err := r.writeImage(tar, name, entrypoint...); err != nil {
		return err
	}
	defer os.Remove(tar)
	return n.importImage(ctx, tar)
}

func digest(b []byte) string {
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:])
}

func blobPath(b []byte) string { return "blobs/" + strings.Replace(digest(b), ":", "/", 1) }
