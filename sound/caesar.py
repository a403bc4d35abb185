"""Decipher messages: each letter is moved by the day's key, which the log shows."""
import json, random
from sandbox.contract import Task, Score
def tool(n,d,**p):
    return {"type":"function","function":{"name":n,"description":d,"parameters":{"type":"object","properties":p,"required":list(p)}}}
def call(n,**a):
    return {"role":"assistant","content":None,"tool_calls":[{"id":"c1","type":"function","function":{"name":n,"arguments":json.dumps(a)}}]}
class Base:
    limit = 30
    def step(self,m):
        self.turn+=1; calls=m.get("tool_calls") or []
        if not calls: self.ended=True
        return [{"role":"tool","tool_call_id":c["id"],"content":json.dumps(self._safe(c["function"]))} for c in calls]
    def _safe(self,f):
        try:
            return self._do(f["name"],json.loads(f["arguments"]))
        except (KeyError,TypeError,ValueError,IndexError,AttributeError): return {"error":"no such tool, or arguments that do not fit"}
    @property
    def done(self): return self.ended or self.turn>=self.limit
    def score(self):
        return Score(1.0 if self.won else 0.0,self.won,{})

W="the fox met two old men near mill lane and gave them bread and salt for their goat then ran home along river".split()
TOOLS=[tool("read_key","The shift of a station's cipher.",station={"type":"string"}),tool("read_message","A message as it came.",number={"type":"integer"}),tool("file_plain","File the plain text of a message.",number={"type":"integer"},text={"type":"string"})]
def shift(t,k): return "".join(chr((ord(c)-97+k)%26+97) if c.isalpha() else c for c in t)
class Environment(Base):
    def reset(self,seed):
        rng=random.Random(seed); self.turn=0; self.ended=False; self.filed={}
        self.keys={s:rng.randrange(1,26) for s in ["alpha","bravo","delta"]}
        self.messages={i:(rng.choice(list(self.keys))," ".join(rng.sample(W,rng.randrange(1,3)))) for i in range(1,rng.randrange(2,5))}
        t=rng.choice(["There are {} messages to decipher.","{} came in overnight; file the plain texts.","Please read {} messages for me.","Decipher the {} new ones.","We have {} in cipher. To work."]).format(len(self.messages))
        return Task("Every station moves each letter of its messages forward by its key.",[{"role":"user","content":t}],TOOLS)
    def _do(self,name,a):
        if name=="read_key": return {"key":self.keys[a["station"]]}
        s,t=self.messages[a["number"]]
        if name=="read_message": return {"station":s,"cipher":shift(t,self.keys[s])}
        if name=="file_plain": self.filed[a["number"]]=str(a["text"]); self.ended=len(self.filed)==len(self.messages); return {"filed":a["number"]}
        raise ValueError
    @property
    def won(self): return self.filed=={n:t for n,(s,t) in self.messages.items()}
    def oracle(self):
        for n,(s,t) in self.messages.items():
            yield call("read_message",number=n); yield call("read_key",station=s); yield call("file_plain",number=n,text=t)
