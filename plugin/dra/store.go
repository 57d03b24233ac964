// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/plugin"
)

// failpoint names a place at which tests end the driver, as SIGKILL would.
type failpoint string

const (
	beforeRecord  failpoint = "nothing is written"
	beforeSpec    failpoint = "the record is written, the CDI spec is not"
	afterSpec     failpoint = "record and CDI spec are written, the kubelet has no answer"
	beforeRemoval failpoint = "nothing is removed"
	betweenFiles  failpoint = "the CDI spec is removed, the record is not"
	afterRemoval  failpoint = "both are removed, the kubelet has no answer"
)

// Store keeps the prepared claims of this node on the disk: a record of each in one
// directory, and its CDI spec in another. Several processes may have a store of the same
// directories, as the drivers of a rolling update do.
type Store struct {
	dir, cdiDir string
	log         logrus.FieldLogger
	at          func(failpoint)

	writing sync.Mutex // held across files

	mu      sync.Mutex                // never held across a file
	files   map[types.UID]fs.FileInfo // of the records, as they were read
	records map[types.UID]Record
	names   map[string]plugin.ClaimPart // by CDI device
	tokens  map[string]plugin.ClaimPart
	newer   map[types.UID]bool // records of a newer version, of which the log tells
}

var _ plugin.Claims = (*Store)(nil)

// Open reads the records in dir, which it makes if needed, and removes CDI specs from
// cdiDir that belong to no record.
func Open(dir, cdiDir string, log logrus.FieldLogger) (*Store, error) {
	s := &Store{
		dir: dir, cdiDir: cdiDir, log: log, at: func(failpoint) {},
		files: map[types.UID]fs.FileInfo{}, records: map[types.UID]Record{}, names: map[string]plugin.ClaimPart{}, tokens: map[string]plugin.ClaimPart{},
		newer: map[types.UID]bool{},
	}
	for _, d := range []string{dir, cdiDir} {
		if err := cdi.MakeDir(d); err != nil {
			return nil, fmt.Errorf("make the directory for prepared claims: %w", err)
		}
	}
	if err := os.Chmod(dir, 0o700); err != nil { // whoever can open it could lock it
		return nil, fmt.Errorf("keep the prepared claims: %w", err)
	}
	unlock, err := s.lock()
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := s.removeDamaged(); err != nil {
		return nil, err
	}
	if err := s.load(); err != nil {
		return nil, err
	}
	return s, s.removeOrphans()
}

// lock keeps other goroutines and other processes from changing files, until the function
// that it returns is called. The kernel takes the lock from a process that ends.
func (s *Store) lock() (unlock func(), err error) {
	s.writing.Lock()
	dir, err := os.Open(s.dir)
	if err == nil {
		for err = unix.EINTR; errors.Is(err, unix.EINTR); {
			err = unix.Flock(int(dir.Fd()), unix.LOCK_EX)
		}
	}
	if err != nil {
		dir.Close()
		s.writing.Unlock()
		return nil, fmt.Errorf("lock the prepared claims: %w", err)
	}
	return func() {
		dir.Close()
		s.writing.Unlock()
	}, nil
}

// recordFiles returns the files of the records, by claim.
func (s *Store) recordFiles() (map[types.UID]fs.FileInfo, error) {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, fmt.Errorf("read the prepared claims: %w", err)
	}
	files := map[types.UID]fs.FileInfo{}
	for _, e := range entries {
		uid, ok := strings.CutSuffix(e.Name(), ".json")
		if !ok {
			continue
		}
		info, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed since
		}
		if err != nil {
			return nil, fmt.Errorf("read the prepared claims: %w", err)
		}
		files[types.UID(uid)] = info
	}
	return files, nil
}

// removeDamaged removes records of which nothing can be relied on. The kubelet prepares
// their claims again, unless it knows that they are prepared: so a record that cannot be read
// now stays, and one of a newer version, which may come back after a rollback. The lock is held.
func (s *Store) removeDamaged() error {
	files, err := s.recordFiles()
	if err != nil {
		return err
	}
	for uid := range files {
		if _, wrong := s.read(uid); wrong != nil && !errors.As(wrong, new(*fs.PathError)) && !errors.As(wrong, new(newerError)) {
			s.log.Errorf("prepared claim %s: %v; removed", s.file(uid), wrong)
			if err := os.Remove(s.file(uid)); err != nil {
				return fmt.Errorf("remove a damaged record: %w", err)
			}
		}
	}
	return nil
}

// load learns what other processes have prepared and unprepared since. What this process
// knows already is not read again. No lock is needed: what another goroutine changes
// meanwhile stays as that goroutine has it.
func (s *Store) load() error {
	s.mu.Lock()
	known := maps.Clone(s.files)
	s.mu.Unlock()
	files, err := s.recordFiles()
	if err != nil {
		return err
	}
	for uid, info := range files {
		if old := known[uid]; old != nil && os.SameFile(old, info) && old.ModTime().Equal(info.ModTime()) {
			continue
		}
		r, err := s.read(uid)
		if errors.Is(err, fs.ErrNotExist) {
			continue // unprepared since
		}
		if errors.As(err, new(newerError)) {
			s.warnOfNewer(uid, err)
			continue
		}
		if err != nil {
			s.log.Errorf("prepared claim %s is not known: %v", s.file(uid), err)
			continue
		}
		s.change(uid, known[uid], func() { s.enter(r, info) })
	}
	for uid := range known {
		if files[uid] == nil {
			s.change(uid, known[uid], func() {})
		}
	}
	return nil
}

// warnOfNewer says, once, that a record of a newer version is kept and not used.
func (s *Store) warnOfNewer(uid types.UID, err error) {
	s.mu.Lock()
	said := s.newer[uid]
	s.newer[uid] = true
	s.mu.Unlock()
	if !said {
		s.log.Warnf("prepared claim %s: %v; its containers run on, and cannot be started again before that", s.file(uid), err)
	}
}

// change forgets a claim and calls enter, unless its file is another one than was known.
func (s *Store) change(uid types.UID, known fs.FileInfo, enter func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.files[uid] == known {
		s.forget(uid)
		enter()
	}
}

func (s *Store) read(uid types.UID) (Record, error) {
	r, err := readRecord(s.file(uid))
	if err == nil && r.UID != uid {
		err = fmt.Errorf("it is of claim %q", r.UID)
	}
	return r, err
}

func readRecord(file string) (r Record, err error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return r, err
	}
	var of struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(data, &of); err != nil {
		return r, fmt.Errorf("damaged: %w", err)
	}
	switch {
	case of.Version > recordVersion:
		return r, newerError(of.Version)
	case of.Version != recordVersion:
		return r, fmt.Errorf("version %d is unknown, this program writes %d", of.Version, recordVersion)
	}
	if err := json.Unmarshal(data, &r); err != nil {
		return r, fmt.Errorf("damaged: %w", err)
	}
	return r, nil
}

// newerError is the version of a record that a newer program wrote.
type newerError int

func (e newerError) Error() string {
	return fmt.Sprintf("a newer nvshare has prepared it (its record has version %d, this program knows %d): install that one again, or delete the claim's pods", int(e), recordVersion)
}

func (s *Store) removeOrphans() error {
	files, err := cdi.ClaimFiles(s.cdiDir)
	if err != nil {
		return err
	}
	for uid, file := range files {
		if _, err := os.Lstat(s.file(types.UID(uid))); !errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove the CDI spec of a claim that is not prepared: %w", err)
		}
		s.log.Infof("removed %s: its claim is not prepared", file)
	}
	return nil
}

// enter makes a record known. mu is held.
func (s *Store) enter(r Record, file fs.FileInfo) {
	s.files[r.UID], s.records[r.UID] = file, r
	for _, share := range r.Shares {
		p := plugin.ClaimPart{Name: share.Name, Claim: r.Namespace + "/" + r.Name, GPU: share.GPU, Terms: share.Terms, Admin: share.Admin}
		s.names[share.Name], s.tokens[share.Token] = p, p
	}
}

// forget is the opposite of enter. mu is held.
func (s *Store) forget(uid types.UID) {
	for _, share := range s.records[uid].Shares {
		delete(s.names, share.Name)
		delete(s.tokens, share.Token)
	}
	delete(s.records, uid)
	delete(s.files, uid)
	delete(s.newer, uid)
}

// Load is load for the plugin.
func (s *Store) Load() {
	if err := s.load(); err != nil {
		s.log.Warn(err)
	}
}

// ByDevice returns the share that a CDI device is; the name is without the kind.
func (s *Store) ByDevice(name string) (plugin.ClaimPart, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	share, ok := s.names[name]
	return share, ok
}

// ByToken returns the share that a token stands for.
func (s *Store) ByToken(token string) (plugin.ClaimPart, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	share, ok := s.tokens[token]
	return share, ok
}

func (s *Store) record(uid types.UID) (Record, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, ok := s.records[uid]
	return r, ok
}

// Records returns the prepared claims, in the order of their UIDs.
func (s *Store) Records() (all []Record) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, uid := range slices.Sorted(maps.Keys(s.records)) {
		all = append(all, s.records[uid])
	}
	return all
}

// prepare writes the record of a claim and its CDI spec. A claim that is prepared
// already keeps its record, unless it was allocated anew since: a claim may be without pods,
// and then get other devices. accept is asked whether there is room for a new one beside the
// others.
func (s *Store) prepare(r Record, accept func(Record, []Record) error, edits editor) (Record, error) {
	unlock, err := s.lock()
	if err != nil {
		return r, err
	}
	defer unlock()
	if err := s.load(); err != nil {
		return r, err
	}
	if old, ok := s.record(r.UID); ok && old.sameShares(r) {
		return old, s.writeSpec(old, edits)
	}
	if _, err := s.read(r.UID); errors.As(err, new(newerError)) {
		return r, err // its containers run, and that one knows what they have
	}
	if err := accept(r, s.Records()); err != nil {
		return r, err
	}
	for i := range r.Shares {
		r.Shares[i].Token = rand.Text()
	}
	data, err := json.Marshal(r)
	if err != nil {
		return r, err
	}
	s.at(beforeRecord)
	if err := cdi.ReplaceFile(s.file(r.UID), data, 0o600, nil); err != nil {
		return r, fmt.Errorf("record the prepared claim: %w", err)
	}
	file, err := os.Stat(s.file(r.UID))
	if err != nil {
		return r, fmt.Errorf("record the prepared claim: %w", err)
	}
	s.mu.Lock()
	s.forget(r.UID)
	s.enter(r, file)
	s.mu.Unlock()
	s.at(beforeSpec)
	if err := s.writeSpec(r, edits); err != nil {
		return r, err
	}
	s.at(afterSpec)
	return r, nil
}

// unprepare removes all of a claim. An unknown claim is no error.
func (s *Store) unprepare(uid types.UID) error {
	unlock, err := s.lock()
	if err != nil {
		return err
	}
	defer unlock()
	return s.remove(uid)
}

// unprepareSame removes all of a claim, unless it was unprepared or allocated anew since the
// record was read.
func (s *Store) unprepareSame(was Record) error {
	unlock, err := s.lock()
	if err != nil {
		return err
	}
	defer unlock()
	if err := s.load(); err != nil {
		return err
	}
	if r, ok := s.record(was.UID); !ok || !r.sameShares(was) {
		return nil
	}
	return s.remove(was.UID)
}

// remove is unprepare with the lock held.
func (s *Store) remove(uid types.UID) error {
	s.at(beforeRemoval)
	if err := os.Remove(cdi.ClaimFile(s.cdiDir, string(uid))); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the claim's CDI spec: %w", err)
	}
	s.at(betweenFiles)
	if err := os.Remove(s.file(uid)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the claim's record: %w", err)
	}
	s.mu.Lock()
	s.forget(uid)
	s.mu.Unlock()
	s.at(afterRemoval)
	return nil
}

// refresh writes the CDI specs of all claims again, because GPUs or driver have
// changed, or the directory was lost. A claim whose GPU is not there keeps its spec.
func (s *Store) refresh(edits editor) {
	unlock, err := s.lock()
	if err != nil {
		s.log.Warnf("claims keep their CDI specs: %v", err)
		return
	}
	defer unlock()
	if err := s.load(); err != nil {
		s.log.Warn(err) // the specs of those that are known are written
	}
	for _, r := range s.Records() {
		if err := s.writeSpec(r, edits); err != nil {
			s.log.Warnf("claim %s/%s keeps its CDI spec: %v", r.Namespace, r.Name, err)
		}
	}
}

// editor returns the CDI edits of the device with this UUID, and what is common to all
// devices.
type editor func(uuid string) (device, common specs.ContainerEdits, err error)

// writeSpec writes the CDI spec of a claim, unless it is there. The lock for writing is held.
func (s *Store) writeSpec(r Record, edits editor) error {
	spec := &specs.Spec{Version: cdi.SpecVersion, Kind: cdi.Kind}
	for _, share := range r.Shares {
		device, common, err := edits(share.GPU)
		if err != nil {
			return err
		}
		spec.ContainerEdits = cdi.ForClaim(common)
		device.Env = slices.Concat(device.Env, []string{plugin.TokenVariable(share.Token)})
		spec.Devices = append(spec.Devices, specs.Device{Name: share.Name, ContainerEdits: device})
	}
	data, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	file := cdi.ClaimFile(s.cdiDir, string(r.UID))
	const mode = 0o600 // it has the tokens, and the runtime is root
	if cdi.HoldsFile(file, data, mode) {
		return nil
	}
	if err := cdi.ReplaceFile(file, data, mode, nil); err != nil {
		return fmt.Errorf("write the claim's CDI spec: %w", err)
	}
	return nil
}

func (s *Store) file(uid types.UID) string { return filepath.Join(s.dir, string(uid)+".json") }
