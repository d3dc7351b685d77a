package main

import (
	"encoding/binary"
	"fmt"
	"io"
)

const (
	frameMagic      = "KVTF"
	preludeBytes    = 16
	maxHeaderBytes  = 8 << 20
	maxPayloadBytes = 256 << 20
)

// frame is one message as the pool sends it.
type frame struct {
	fields  map[string]any
	payload []byte
}

// packFrame is prelude and header of a request; the payload, if any, is sent behind it.
func packFrame(header []byte, payloadBytes int) []byte {
	out := append(make([]byte, 0, preludeBytes+len(header)), frameMagic...)
	out = binary.LittleEndian.AppendUint32(out, uint32(len(header)))
	out = binary.LittleEndian.AppendUint64(out, uint64(payloadBytes))
	return append(out, header...)
}

// readFrame receives one frame. Lengths are checked before memory is taken; the end of the connection in the middle is
// an error, io.ErrUnexpectedEOF, and between frames io.EOF.
func readFrame(from io.Reader) (frame, error) {
	var prelude [preludeBytes]byte
	if _, err := io.ReadFull(from, prelude[:]); err != nil {
		return frame{}, err
	}
	headerBytes := binary.LittleEndian.Uint32(prelude[4:])
	payloadBytes := binary.LittleEndian.Uint64(prelude[8:])
	if string(prelude[:4]) != frameMagic || headerBytes > maxHeaderBytes || payloadBytes > maxPayloadBytes {
		return frame{}, fmt.Errorf("no frame of the block protocol begins with %x", prelude)
	}
	header := make([]byte, headerBytes)
	if err := readRest(from, header); err != nil {
		return frame{}, err
	}
	fields, err := unpackMap(header)
	if err != nil {
		return frame{}, err
	}
	payload := make([]byte, payloadBytes)
	return frame{fields, payload}, readRest(from, payload)
}

// readRest fills a buffer; the frame has begun, so that an end here is never a clean one.
func readRest(from io.Reader, buffer []byte) error {
	_, err := io.ReadFull(from, buffer)
	if err == io.EOF && len(buffer) > 0 {
		return io.ErrUnexpectedEOF
	}
	return err
}
