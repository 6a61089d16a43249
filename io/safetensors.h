#ifndef FULLSHARD_IO_SAFETENSORS_H_
#define FULLSHARD_IO_SAFETENSORS_H_

// The safetensors format, read and written: one file, or a Hugging Face folder
// with an index.

#include "fullshard/io/safetensors_file.h"           // IWYU pragma: export
#include "fullshard/io/safetensors_folder_writer.h"  // IWYU pragma: export
#include "fullshard/io/safetensors_reader.h"         // IWYU pragma: export
#include "fullshard/io/safetensors_writer.h"         // IWYU pragma: export

#endif  // FULLSHARD_IO_SAFETENSORS_H_
