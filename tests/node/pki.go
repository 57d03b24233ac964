// SPDX-License-Identifier: Apache-2.0

package node

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// writePKI writes to dir, as NAME.crt and NAME.key: a certificate authority, the
// certificates that it signed for each part of a cluster, and the service accounts' key.
func writePKI(dir string) error {
	ca := &x509.Certificate{
		Subject: pkix.Name{CommonName: "test"}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	caKey, err := writeCert(dir, "ca", ca, nil, nil)
	if err != nil {
		return err
	}
	client := []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	server := []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	ips := []net.IP{net.ParseIP("127.0.0.1"), net.ParseIP(kubeAPI), net.ParseIP(kubeNodeIP)}
	for name, cert := range map[string]*x509.Certificate{
		"apiserver": {Subject: pkix.Name{CommonName: "kube-apiserver"}, ExtKeyUsage: server, IPAddresses: ips,
			DNSNames: []string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"}},
		"apiserver-kubelet": {Subject: pkix.Name{CommonName: "kube-apiserver-kubelet-client", Organization: []string{"system:masters"}}, ExtKeyUsage: client},
		"admin":             {Subject: pkix.Name{CommonName: "admin", Organization: []string{"system:masters"}}, ExtKeyUsage: client},
		"manager":           {Subject: pkix.Name{CommonName: "system:kube-controller-manager"}, ExtKeyUsage: client},
		"scheduler":         {Subject: pkix.Name{CommonName: "system:kube-scheduler"}, ExtKeyUsage: client},
		"kubelet":           {Subject: pkix.Name{CommonName: "system:node:" + KubeNode, Organization: []string{"system:nodes"}}, ExtKeyUsage: client},
		"kubelet-serving":   {Subject: pkix.Name{CommonName: KubeNode}, ExtKeyUsage: server, IPAddresses: ips, DNSNames: []string{KubeNode}},
	} {
		if _, err := writeCert(dir, name, cert, ca, caKey); err != nil {
			return err
		}
	}
	key, err := writeKey(dir, "sa")
	if err != nil {
		return err
	}
	public, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return err
	}
	return writePEM(filepath.Join(dir, "sa.pub"), "PUBLIC KEY", public)
}

// writeCert signs cert with the authority's key, or with its own.
func writeCert(dir, name string, cert, ca *x509.Certificate, caKey *ecdsa.PrivateKey) (*ecdsa.PrivateKey, error) {
	key, err := writeKey(dir, name)
	if err != nil {
		return nil, err
	}
	if ca == nil {
		ca, caKey = cert, key
	}
	if cert.SerialNumber, err = rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 100)); err != nil {
		return nil, err
	}
	cert.NotBefore, cert.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(24*time.Hour)
	der, err := x509.CreateCertificate(rand.Reader, cert, ca, key.Public(), caKey)
	if err != nil {
		return nil, err
	}
	return key, writePEM(filepath.Join(dir, name+".crt"), "CERTIFICATE", der)
}

func writeKey(dir, name string) (*ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	return key, writePEM(filepath.Join(dir, name+".key"), "EC PRIVATE KEY", der)
}

func writePEM(file, kind string, der []byte) error {
	return os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600)
}
