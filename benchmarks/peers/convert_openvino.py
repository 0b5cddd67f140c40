"""GGUF (F16 or Q8_0) -> a folder that OpenVINO GenAI reads. It reads GGUF itself; here it saves what it made of it.

usage: python convert_openvino.py IN.gguf FOLDER [--widen]

--widen: 16-bit constants become 32-bit ones, so that nothing is unpacked while it computes.
"""

import argparse
import os
import shutil
import tempfile

import openvino as ov
import openvino_genai as genai


def widen(model: ov.Model) -> int:
    """Replace every (16-bit constant -> Convert to 32 bits) by one 32-bit constant; how many."""
    num_widened = 0
    for convert in model.get_ops():
        if convert.get_type_name() != "Convert" or convert.get_element_type() != ov.Type.f32:
            continue
        constant = convert.input_value(0).get_node()
        if constant.get_type_name() == "Constant" and constant.get_element_type() == ov.Type.f16:
            wide = ov.opset13.constant(constant.data.astype("float32"))
            wide.set_friendly_name(constant.get_friendly_name())
            convert.output(0).replace(wide.output(0))
            num_widened += 1
    return num_widened


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf")
    parser.add_argument("folder")
    parser.add_argument("--widen", action="store_true")
    args = parser.parse_args()
    os.makedirs(args.folder, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        # The model is saved beside the GGUF file.
        source = os.path.join(temporary, "model.gguf")
        os.symlink(os.path.abspath(args.gguf), source)
        genai.LLMPipeline(source, "CPU", enable_save_ov_model=True)
        if args.widen:
            model = ov.Core().read_model(os.path.join(temporary, "openvino_model.xml"))
            if not widen(model):
                raise SystemExit(f"{args.gguf}: no 16-bit constants found to widen")
            wide = os.path.join(temporary, "wide")
            os.mkdir(wide)
            ov.save_model(model, os.path.join(wide, "openvino_model.xml"), compress_to_fp16=False)
            del model  # its file is mapped
            for name in os.listdir(wide):
                os.replace(os.path.join(wide, name), os.path.join(temporary, name))
        for name in sorted(os.listdir(temporary)):
            if name.startswith("openvino_"):
                shutil.move(os.path.join(temporary, name), os.path.join(args.folder, name))


if __name__ == "__main__":
    main()
