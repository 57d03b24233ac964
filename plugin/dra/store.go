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
	"k8s.io/apimachinery/pkg/types"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/plugin"
)

// failpoint names a place at which tests end the driver, as SIGKILL would.
type failpoint string

// PrepareFailpoints and UnprepareFailpoints are the failpoints that Config.At is called
// with, in the order in which the driver comes to them.
var (
	PrepareFailpoints   = []string{string(beforeRecord), string(beforeSpec), string(afterSpec)}
	UnprepareFailpoints = []string{string(beforeRemoval), string(betweenFiles), string(afterRemoval)}
)

const (
	beforeRecord  failpoint = "nothing is written"
	beforeSpec    failpoint = "the record is written, the CDI spec is not"
	afterSpec     failpoint = "record and CDI spec are written, the kubelet has no answer"
	beforeRemoval failpoint = "nothing is removed"
	betweenFiles  failpoint = "the CDI spec is removed, the record is not"
	afterRemoval  failpoint = "both are removed, the kubelet has no answer"
)

// Store keeps the prepared claims of this node on the disk: a record of each in one
// directory, and its CDI spec in another.
type Store struct {
	dir, cdiDir string
	log         logrus.FieldLogger
	at          func(failpoint)

	writing sync.Mutex // held across files

	mu      sync.Mutex // never held across a file
	records map[types.UID]Record
	names   map[string]plugin.Share // by CDI device
	tokens  map[string]plugin.Share
}

var _ plugin.Claims = (*Store)(nil)

// Open reads the records in dir, which it makes if needed, and removes CDI specs from
// cdiDir that belong to no record.
func Open(dir, cdiDir string, log logrus.FieldLogger) (*Store, error) {
	s := &Store{
		dir: dir, cdiDir: cdiDir, log: log, at: func(failpoint) {},
		records: map[types.UID]Record{}, names: map[string]plugin.Share{}, tokens: map[string]plugin.Share{},
	}
	for _, d := range []string{dir, cdiDir} {
		if err := cdi.MakeDir(d); err != nil {
			return nil, fmt.Errorf("make the directory for prepared claims: %w", err)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("read the prepared claims: %w", err)
	}
	for _, e := range entries {
		uid, ok := strings.CutSuffix(e.Name(), ".json")
		if !ok {
			continue
		}
		file := filepath.Join(dir, e.Name())
		r, err := readRecord(file)
		if err == nil && string(r.UID) != uid {
			err = fmt.Errorf("it is of claim %q", r.UID)
		}
		if err != nil {
			// Nothing of it can be relied on. The kubelet prepares the claim again.
			log.Errorf("prepared claim %s: %v; removed", file, err)
			if err := os.Remove(file); err != nil {
				return nil, fmt.Errorf("remove a damaged record: %w", err)
			}
			continue
		}
		s.enter(r)
	}
	return s, s.removeOrphans()
}

func readRecord(file string) (r Record, err error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return r, err
	}
	if err := json.Unmarshal(data, &r); err != nil {
		return r, fmt.Errorf("damaged: %w", err)
	}
	if r.Version != recordVersion {
		return r, fmt.Errorf("version %d is unknown, this program writes %d", r.Version, recordVersion)
	}
	return r, nil
}

func (s *Store) removeOrphans() error {
	files, err := cdi.ClaimFiles(s.cdiDir)
	if err != nil {
		return err
	}
	for uid, file := range files {
		if _, known := s.record(types.UID(uid)); known {
			continue
		}
		if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove the CDI spec of a claim that is not prepared: %w", err)
		}
		s.log.Infof("removed %s: its claim is not prepared", file)
	}
	return nil
}

// enter makes a record known.
func (s *Store) enter(r Record) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.records[r.UID] = r
	for _, share := range r.Shares {
		p := plugin.Share{Name: share.Name, Claim: r.Namespace + "/" + r.Name, GPU: share.GPU, Terms: share.Terms}
		s.names[share.Name], s.tokens[share.Token] = p, p
	}
}

func (s *Store) forget(uid types.UID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, share := range s.records[uid].Shares {
		delete(s.names, share.Name)
		delete(s.tokens, share.Token)
	}
	delete(s.records, uid)
}

// ByDevice returns the share that a CDI device is; the name is without the kind.
func (s *Store) ByDevice(name string) (plugin.Share, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	share, ok := s.names[name]
	return share, ok
}

// ByToken returns the share that a token stands for.
func (s *Store) ByToken(token string) (plugin.Share, bool) {
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

// share returns the share with this name, and its claim.
func (s *Store) share(name string) (Record, Share, bool) {
	for _, r := range s.Records() {
		for _, share := range r.Shares {
			if share.Name == name {
				return r, share, true
			}
		}
	}
	return Record{}, Share{}, false
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
// already keeps its record. accept is asked whether there is room for a new one beside
// the others.
func (s *Store) prepare(r Record, accept func(Record, []Record) error, edits editor) (Record, error) {
	s.writing.Lock()
	defer s.writing.Unlock()
	if old, ok := s.record(r.UID); ok {
		return old, s.writeSpec(old, edits)
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
	s.enter(r)
	s.at(beforeSpec)
	if err := s.writeSpec(r, edits); err != nil {
		return r, err
	}
	s.at(afterSpec)
	return r, nil
}

// unprepare removes all of a claim. An unknown claim is no error.
func (s *Store) unprepare(uid types.UID) error {
	s.writing.Lock()
	defer s.writing.Unlock()
	s.at(beforeRemoval)
	if err := os.Remove(cdi.ClaimFile(s.cdiDir, string(uid))); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the claim's CDI spec: %w", err)
	}
	s.at(betweenFiles)
	if err := os.Remove(s.file(uid)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the claim's record: %w", err)
	}
	s.forget(uid)
	s.at(afterRemoval)
	return nil
}

// refresh writes the CDI specs of all claims again, because GPUs or driver have
// changed, or the directory was lost. A claim whose GPU is not there keeps its spec.
func (s *Store) refresh(edits editor) {
	s.writing.Lock()
	defer s.writing.Unlock()
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
		spec.ContainerEdits = common
		device.Env = slices.Concat(device.Env, []string{fmt.Sprintf("%s%.8s=%s", plugin.TokenEnv, share.Token, share.Token)})
		spec.Devices = append(spec.Devices, specs.Device{Name: share.Name, ContainerEdits: device})
	}
	data, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	file := cdi.ClaimFile(s.cdiDir, string(r.UID))
	if cdi.HoldsFile(file, data, 0o644) {
		return nil
	}
	if err := cdi.ReplaceFile(file, data, 0o644, nil); err != nil {
		return fmt.Errorf("write the claim's CDI spec: %w", err)
	}
	return nil
}

func (s *Store) file(uid types.UID) string { return filepath.Join(s.dir, string(uid)+".json") }
