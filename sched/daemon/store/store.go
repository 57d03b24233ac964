// SPDX-License-Identifier: Apache-2.0

// Package store keeps the host memory of suspended processes in files of a directory.
//
// A process's memory is its segments (package segments). Save writes all of them to one file,
// Empty gives their pages back to the kernel, and Load fills them again. What the caller has
// to see to: that nothing of the process uses the segments between Save and the end of Load,
// and that it is recorded somewhere that Save has ended, before Empty.
//
// What it guarantees:
//
//   - Save changes no segment. If it fails, there is no file.
//   - Load returns nil only if each byte is as Save found it. If it fails, the segments have
//     any content, and the file is as before.
//   - A file has the mode 0600. It is neither linked to nor followed to another one.
//   - The page cache keeps little of a file: memory is short when files are written.
package store

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/daemon/arena"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/segments"
)

const (
	// piece is how many bytes are copied at a time.
	piece = 1 << 20
	// flush is after how many bytes the disk is waited for, and the page cache emptied.
	flush = 64 << 20
	// leavePart is the part of the file system that is left to others.
	leavePart = 16
)

// ErrFull says that there is no room for a file.
var ErrFull = errors.New("no room")

// Dir is a directory of files.
type Dir struct {
	path   string
	bootID string
	Statfs func(path string, to *unix.Statfs_t) error // unix.Statfs, except in tests
}

// Open returns a directory for files, which leave a sixteenth of the file system free. It says
// why no memory can be kept there.
func Open(path, bootID string) (*Dir, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("%w (make it, with the mode 0700, on a disk)", err)
	}
	if !info.IsDir() {
		return nil, fmt.Errorf("%s is not a directory", path)
	}
	if info.Mode().Perm()&0o022 != 0 {
		return nil, fmt.Errorf("%s can be written by others, and tenants' data is kept there: chmod 0700 %s", path, path)
	}
	var system unix.Statfs_t
	if err := unix.Statfs(path, &system); err != nil {
		return nil, fmt.Errorf("statfs %s: %w", path, err)
	}
	switch uint32(system.Type) {
	case unix.TMPFS_MAGIC, unix.RAMFS_MAGIC, unix.HUGETLBFS_MAGIC:
		return nil, fmt.Errorf("%s is in memory, which is what is short: give a directory on a disk", path)
	}
	probe, err := os.CreateTemp(path, "nvshare-*.probe")
	if err != nil {
		return nil, fmt.Errorf("%s cannot be written: %w", path, err)
	}
	probe.Close()
	if err := os.Remove(probe.Name()); err != nil {
		return nil, err
	}
	if err := segments.CanOpen(); err != nil {
		return nil, err
	}
	return &Dir{path, bootID, unix.Statfs}, nil
}

// Room says why there is no room for a file of so many bytes; nil: there is.
func (d *Dir) Room(bytes uint64) error {
	var system unix.Statfs_t
	if err := d.Statfs(d.path, &system); err != nil {
		return fmt.Errorf("statfs %s: %w", d.path, err)
	}
	block := uint64(system.Bsize)
	free, leave := system.Bavail*block, system.Blocks/leavePart*block
	if bytes+leave > free {
		return fmt.Errorf("%w in %s for %d MiB: %d MiB are free, and a sixteenth, %d MiB, is left to others", ErrFull, d.path, bytes>>20, free>>20, leave>>20)
	}
	return nil
}

// PathOf is a file of a process; number tells its files apart.
func (d *Dir) PathOf(p peer.Process, number uint64) string {
	return filepath.Join(d.path, fmt.Sprintf("nvshare-%s-%d-%d-%d.arena", d.bootID, p.PID, p.Start, number))
}

// Others returns the files in the directory that are of an earlier boot, or of processes for
// which lives says no: they are of nobody. known are not looked at. It returns the files of
// processes that live, too.
func (d *Dir) Others(known map[string]bool, lives func(peer.Process) bool) (nobodys, somebodys []string, err error) {
	all, err := filepath.Glob(filepath.Join(d.path, "nvshare-*.arena"))
	for _, path := range all {
		if known[path] {
			continue
		}
		name := filepath.Base(path)
		rest, found := strings.CutPrefix(name, "nvshare-"+d.bootID+"-")
		var p peer.Process
		n, _ := fmt.Sscanf(rest, "%d-%d-", &p.PID, &p.Start)
		switch {
		case found && n != 2, !found && strings.Count(name, "-") < 4: // not one of ours
		case found && lives(p):
			somebodys = append(somebodys, path)
		default:
			nobodys = append(nobodys, path)
		}
	}
	return nobodys, somebodys, err
}

// Part is a segment in a file. The parts follow each other in the order of their list.
type Part struct {
	Inode uint64 `json:"inode"` // of the segment
	Size  uint64 `json:"bytes"`
	Sum   uint32 `json:"crc32c"`
}

// Bytes is the size of all parts.
func Bytes(parts []Part) (sum uint64) {
	for _, p := range parts {
		sum += p.Size
	}
	return sum
}

var (
	castagnoli = crc32.MakeTable(crc32.Castagnoli)
	zeros      = make([]byte, piece)
)

// Save writes segments to a new file. It gives up when goOn returns an error.
func Save(path string, from []segments.Segment, goOn func() error) (parts []Part, err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() {
		if e := f.Close(); err == nil {
			err = e
		}
		if err != nil {
			os.Remove(path)
		}
	}()
	size := uint64(0)
	for _, s := range from {
		parts = append(parts, Part{Inode: s.Inode, Size: s.Size})
		size += s.Size
	}
	// A disk that is full says so before anything is written. Not all file systems can.
	if err := unix.Fallocate(int(f.Fd()), 0, 0, int64(size)); err != nil && !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EINTR) {
		return nil, full(&os.PathError{Op: "fallocate", Path: path, Err: err})
	}
	if err := f.Truncate(int64(size)); err != nil {
		return nil, err
	}
	at := uint64(0)
	err = pieces(parts, goOn, func(i int, from_, n uint64, buf []byte) error {
		if _, err := from[i].ReadAt(buf, int64(from_)); err != nil {
			return fmt.Errorf("read the memory of the process: %w", err)
		}
		parts[i].Sum = crc32.Update(parts[i].Sum, castagnoli, buf)
		if !bytes.Equal(buf, zeros[:n]) { // the new file has zeros
			if _, err := f.WriteAt(buf, int64(at)); err != nil {
				return full(err)
			}
		}
		if at += n; at%flush == 0 {
			return settle(f)
		}
		return nil
	})
	if err == nil {
		err = settle(f)
	}
	return parts, err
}

func full(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return fmt.Errorf("%w: %w", ErrFull, err)
	}
	return err
}

// settle waits for the disk, and has the page cache drop the file.
func settle(f *os.File) error {
	if err := unix.Fdatasync(int(f.Fd())); err != nil {
		return full(&os.PathError{Op: "fdatasync", Path: f.Name(), Err: err})
	}
	_ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
	return nil
}

// pieces calls do for each piece of each part, with a buffer of its size.
func pieces(parts []Part, goOn func() error, do func(part int, from, n uint64, buf []byte) error) error {
	buf := make([]byte, piece)
	for i, p := range parts {
		for from := uint64(0); from < p.Size; from += piece {
			if err := goOn(); err != nil {
				return err
			}
			n := min(piece, p.Size-from)
			if err := do(i, from, n, buf[:n]); err != nil {
				return err
			}
		}
	}
	return nil
}

// Load fills segments with what a file has of them. It gives up when goOn returns an error.
func Load(path string, parts []Part, all []segments.Segment, goOn func() error) error {
	to, err := choose(parts, all)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	switch {
	case err != nil:
		return err
	case !info.Mode().IsRegular():
		return fmt.Errorf("%s is not a regular file", path)
	case uint64(info.Size()) != Bytes(parts):
		return fmt.Errorf("%s is damaged: it has %d bytes, and had %d", path, info.Size(), Bytes(parts))
	}
	_ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_SEQUENTIAL)
	for _, s := range to {
		if err := arena.Refill(s.File, s.Size, func(uint64) error { return goOn() }); err != nil {
			return fmt.Errorf("host memory: %w", err)
		}
	}
	at := uint64(0)
	sums := make([]uint32, len(parts))
	err = pieces(parts, goOn, func(i int, from, n uint64, buf []byte) error {
		if _, err := f.ReadAt(buf, int64(at)); err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return fmt.Errorf("read %s: %w", path, err)
		}
		sums[i] = crc32.Update(sums[i], castagnoli, buf)
		if _, err := to[i].WriteAt(buf, int64(from)); err != nil {
			return fmt.Errorf("write the memory of the process: %w", err)
		}
		if at += n; at%flush == 0 {
			_ = unix.Fadvise(int(f.Fd()), 0, int64(at), unix.FADV_DONTNEED)
		}
		return nil
	})
	_ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
	if err != nil {
		return err
	}
	for i, p := range parts {
		if sums[i] != p.Sum {
			return fmt.Errorf("%s is damaged: its part %d has the sum %08x, and had %08x", path, i, sums[i], p.Sum)
		}
	}
	return nil
}

// Empty gives the pages of those segments back to the kernel that are in a file.
func Empty(parts []Part, all []segments.Segment) error {
	from, err := choose(parts, all)
	for _, s := range from {
		for {
			e := unix.Fallocate(int(s.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, int64(s.Size))
			if e == nil {
				break
			} else if e != unix.EINTR {
				return fmt.Errorf("give memory back: %w", e)
			}
		}
	}
	return err
}

// choose returns the segments of which a file has the parts, in their order.
func choose(parts []Part, all []segments.Segment) (chosen []segments.Segment, err error) {
	for _, p := range parts {
		found := false
		for _, s := range all {
			if s.Inode == p.Inode && s.Size == p.Size && !s.Huge {
				chosen, found = append(chosen, s), true
				break
			}
		}
		if !found {
			return nil, fmt.Errorf("the process has unmapped a segment of %d MiB of its memory", p.Size>>20)
		}
	}
	return chosen, nil
}
